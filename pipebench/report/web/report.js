// What scripts add to the page: the theme, sorting, filtering, links to points, timelines, and details open on paper.
// The page says everything without them. Nothing is fetched: the data stand in the page.
"use strict";

const root = document.documentElement;
const POINT = /^#point-[0-9a-f]{12}$/; // the address is anyone's to write: nothing else becomes a look-up
const unpacked = new Map(); // timelines by their box
const redraws = new Map(); // of the timelines drawn, by their box

// The theme is set before the page is shown. Storage may be forbidden, for a file for one.
function stored(name, value) {
  try {
    return value === undefined ? localStorage.getItem(name) : localStorage.setItem(name, value);
  } catch {
    return null;
  }
}

const storedTheme = stored("pipebench-theme");
if (storedTheme === "light" || storedTheme === "dark") root.dataset.theme = storedTheme;

const redrawAll = () => redraws.forEach((redraw) => redraw());

function themes() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const tell = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} theme`);
    redrawAll();
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    stored("pipebench-theme", root.dataset.theme);
    tell();
  });
  system.addEventListener("change", tell);
  tell();
}

// Sorting: a button in every header, by the number behind a cell where it has one. What has none stays last.

function sortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  for (const [column, header] of headers.entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const ascending = header.getAttribute("aria-sort") !== "ascending";
      headers.forEach((each) => each.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column], ascending ? 1 : -1)));
    });
  }
}

function compare(a, b, direction) {
  const [x, y] = [a, b].map((cell) => (cell.dataset.value === undefined ? NaN : Number(cell.dataset.value)));
  if (Number.isNaN(x) && Number.isNaN(y)) {
    return direction * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  }
  if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return direction * (x - y);
}

// Filtering: of each key any of the values ticked, all keys at once; the choice stands in the address.

function filtering(points) {
  const form = document.getElementById("filter");
  const told = new Map(Object.keys(points).map((key) => [key, []]));
  document.querySelectorAll("[data-key]").forEach((each) => told.get(each.dataset.key)?.push(each));
  const chosen = () => {
    const values = {};
    form.querySelectorAll("input:checked").forEach((input) => (values[input.name] ??= []).push(input.value));
    return values;
  };
  const apply = () => {
    const values = chosen();
    let shown = 0;
    for (const [key, elements] of told) {
      const fits = Object.entries(values).every(([name, allowed]) => allowed.includes(points[key][name]));
      shown += fits;
      for (const each of elements) {
        if (each.tagName === "TD") each.classList.toggle("dimmed", !fits);
        else each.hidden = !fits;
      }
    }
    document.getElementById("count").textContent = `${shown} of ${told.size} points shown`;
  };
  form.addEventListener("change", () => {
    apply();
    remember(form);
  });
  form.addEventListener("reset", () => setTimeout(() => { // after the boxes are cleared
    apply();
    remember(form);
  }));
  form.addEventListener("submit", (event) => event.preventDefault());
  recall(form);
  apply();
  return { apply, form };
}

function remember(form) {
  const values = new URLSearchParams(new FormData(form)).toString();
  history.replaceState(null, "", values ? `#${values}` : location.href.split("#")[0]);
}

function recall(form) {
  if (POINT.test(location.hash)) return;
  const values = new URLSearchParams(location.hash.slice(1));
  form.querySelectorAll("input").forEach((input) => (input.checked = values.getAll(input.name).includes(input.value)));
}

// Points: a link opens its point, and a timeline is drawn when its point is first opened.

function openAddressed(filter) {
  if (!POINT.test(location.hash)) return;
  const point = document.getElementById(location.hash.slice(1));
  if (!point) return;
  if (point.hidden) {
    filter.form.querySelectorAll("input").forEach((input) => (input.checked = false));
    filter.apply();
  }
  point.open = true;
  point.scrollIntoView();
  point.querySelector("summary").focus({ preventScroll: true });
}

// All are unpacked soon after loading, so that none is missing when the page is printed.
async function timelines(boxes, data) {
  if (typeof DecompressionStream === "undefined") return; // then each says where else it can be seen
  for (const box of boxes) box.closest("details").addEventListener("toggle", () => drawIfOpen(box, data.words));
  for (const box of boxes) {
    unpacked.set(box, await unpack(data.timelines[box.dataset.timeline]));
    drawIfOpen(box, data.words);
  }
}

function drawIfOpen(box, words) {
  if (redraws.has(box) || !unpacked.has(box) || !box.closest("details").open) return;
  redraws.set(box, buildTimeline(box, unpacked.get(box), words));
}

// Paper has no buttons to open anything: all stands open while printing, and timelines are drawn in light colours.
function printing(boxes, data) {
  const opened = new Set();
  let theme;
  const begin = () => {
    if (root.classList.contains("printing")) return;
    root.classList.add("printing");
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    document.querySelectorAll("details:not([open])").forEach((each) => {
      opened.add(each);
      each.open = true;
    });
    boxes.forEach((box) => drawIfOpen(box, data.words));
    redrawAll();
  };
  const end = () => {
    if (!root.classList.contains("printing")) return;
    root.classList.remove("printing");
    opened.forEach((each) => (each.open = false));
    opened.clear();
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    redrawAll();
  };
  window.addEventListener("beforeprint", begin);
  window.addEventListener("afterprint", end);
  matchMedia("print").addEventListener("change", (event) => (event.matches ? begin() : end()));
}

document.addEventListener("DOMContentLoaded", () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll(".scripted").forEach((each) => (each.hidden = false));
  themes();
  document.querySelectorAll("table[data-sortable]").forEach(sortable);
  const filter = document.getElementById("filter") ? filtering(data.points) : null;
  const boxes = [...document.querySelectorAll(".timeline")];
  timelines(boxes, data);
  printing(boxes, data);
  openAddressed(filter);
  window.addEventListener("hashchange", () => openAddressed(filter));
});
