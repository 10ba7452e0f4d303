// A point's timeline: the lanes of its step above those of its replay, on one time scale, to be zoomed and pointed at.
// Drawn on a canvas, since every move redraws thousands of boxes; as elements of the page they would make it crawl.
"use strict";

const LABEL = 56, HEAD = 24, GAP = 12, AXIS = 24, LANE_GAP = 2; // lengths in CSS pixels
const MOST_ZOOM = 2000;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

// Returns each rank's spans. `index` counts all actions: the same action has the same one in step and replay.
function lanesOf(packed, which) {
  let index = 0;
  return packed.ranks.map((row, rank) => {
    let clock = 0;
    return Array.from(row.ops, (op, place) => {
      const start = clock + packed[which][rank][2 * place];
      clock = start + packed[which][rank][2 * place + 1];
      const [stage, microBatch] = [row.stages[place], row.micro_batches[place]];
      return { index: index++, rank, op, stage, microBatch, start: start * packed.unit_s, end: clock * packed.unit_s };
    });
  });
}

function panel(title, head, lanes) {
  return { title, head, lanes, spans: lanes.flat(), makespan: Math.max(...lanes.map((lane) => lane.at(-1)?.end ?? 0)) };
}

const milliseconds = (seconds) => {
  const value = seconds * 1e3;
  if (value === 0) return "0";
  return value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value)))));
};

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Puts the timeline into `box` and returns the function that draws it anew.
function buildTimeline(box, packed, words) {
  const panels = [
    panel(`${packed.kind} step`, packed.heads.step, lanesOf(packed, "step")),
    panel("replayed", packed.heads.replayed, lanesOf(packed, "replayed")),
  ];
  const total = Math.max(...panels.map((each) => each.makespan));
  const lane = Math.max(6, Math.min(20, Math.floor(320 / packed.ranks.length)));
  const timeline = {
    box, packed, words, panels, total, lane,
    from: 0, to: total, chosen: null,
    canvas: element("canvas", { tabIndex: 0 }),
    range: element("span", { className: "range" }),
    tip: element("div", { className: "tip" }),
  };
  const { canvas } = timeline;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", box.dataset.alternative);
  canvas.setAttribute("aria-roledescription", "timeline");
  canvas.style.height = `${heightOf(timeline)}px`;
  timeline.tip.setAttribute("role", "status");
  timeline.redraw = () => draw(timeline);
  box.querySelector(".fallback").hidden = true;
  box.append(toolsOf(timeline), canvas, timeline.tip, element("small", {
    className: "help",
    textContent: "Ctrl and wheel, two fingers, + and − zoom; dragging moves; arrow keys go from action to action; 0 shows all.",
  }));
  listen(timeline);
  new ResizeObserver(timeline.redraw).observe(canvas);
  timeline.redraw();
  return timeline.redraw;
}

function toolsOf(timeline) {
  const { packed, words } = timeline;
  const ops = Object.entries(packed.colors).map(([op, colors]) => {
    const swatches = colors.map((color) => {
      const swatch = element("span", {});
      swatch.style.background = color;
      return swatch;
    });
    return element("li", {}, ...swatches, `${op} ${words[op]}`);
  });
  const shades = Math.max(...Object.values(packed.colors).map((colors) => colors.length));
  const idle = element("span", { className: "idle" });
  ops.push(element("li", {}, idle, shades > 1 ? "idle; lighter: a rank's later stages" : "idle"));
  const button = (text, label, action) => {
    const made = element("button", { type: "button", textContent: text, onclick: action });
    made.setAttribute("aria-label", label);
    return made;
  };
  const buttons = element("div", {},
    button("+", "Zoom in", () => zoom(timeline, 1 / 2)),
    button("−", "Zoom out", () => zoom(timeline, 2)),
    button("Whole step", "Whole step", () => show(timeline, 0, timeline.total)),
    timeline.range);
  return element("div", { className: "tools" }, element("ul", { className: "ops" }, ...ops), buttons);
}

// Geometry: panels below each other, one lane a rank, the axis below all.

const panelHeight = (timeline) => HEAD + timeline.packed.ranks.length * (timeline.lane + LANE_GAP);
const heightOf = (timeline) => 2 * panelHeight(timeline) + GAP + AXIS;
const laneTop = (timeline, panel, rank) =>
  panel * (panelHeight(timeline) + GAP) + HEAD + rank * (timeline.lane + LANE_GAP);
const perSecond = (timeline) => (timeline.canvas.clientWidth - LABEL) / (timeline.to - timeline.from);
const leftOf = (timeline, seconds) => LABEL + (seconds - timeline.from) * perSecond(timeline);
const timeAt = (timeline, x) => timeline.from + (x - LABEL) / perSecond(timeline);

// Returns what lies under a place: panel and span, or panel and pause; null outside of all lanes.
function at(timeline, x, y) {
  const seconds = timeAt(timeline, x);
  for (const [number, { lanes, makespan }] of timeline.panels.entries()) {
    const rank = Math.floor((y - laneTop(timeline, number, 0)) / (timeline.lane + LANE_GAP));
    if (rank < 0 || rank >= lanes.length || x < LABEL || seconds > makespan) continue;
    const next = lanes[rank].find((span) => span.end > seconds);
    if (next && next.start <= seconds) return { panel: number, span: next };
    const before = lanes[rank].findLast((span) => span.end <= seconds);
    return { panel: number, pause: { rank, start: before?.end ?? 0, end: next?.start ?? makespan, next } };
  }
  return null;
}

function draw(timeline) {
  const { canvas, panels, total } = timeline;
  const width = canvas.clientWidth, height = heightOf(timeline), ratio = window.devicePixelRatio || 1;
  if (!width) return; // inside closed details
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const look = colorsOf(canvas);
  context.textBaseline = "middle";
  for (const number of panels.keys()) drawPanel(timeline, context, look, number, width);
  drawAxis(timeline, context, look, width, height);
  const whole = timeline.from === 0 && timeline.to === total;
  timeline.range.textContent = `${milliseconds(timeline.from)} to ${milliseconds(timeline.to)} ms`;
  timeline.box.classList.toggle("zoomed", !whole);
}

// A canvas does not follow the page's variables by itself.
function colorsOf(canvas) {
  const read = (name) => {
    canvas.style.color = `var(--${name})`;
    return getComputedStyle(canvas).color;
  };
  return { ink: read("ink"), muted: read("muted"), rule: read("rule"), idle: read("idle") };
}

function drawPanel(timeline, context, look, number, width) {
  const { title, head, lanes, makespan, spans } = timeline.panels[number];
  const top = laneTop(timeline, number, 0) - HEAD;
  context.font = `600 13px ${getComputedStyle(timeline.canvas).fontFamily}`;
  context.fillStyle = look.ink;
  const heading = title[0].toUpperCase() + title.slice(1);
  context.fillText(heading, 0, top + HEAD / 2);
  const indent = context.measureText(heading).width + 12;
  context.font = context.font.replace("600 13px", "12px");
  context.fillStyle = look.muted;
  context.fillText(head, indent, top + HEAD / 2);
  for (const rank of lanes.keys()) {
    context.fillStyle = look.muted;
    const label = timeline.lane < 11 && rank % 2 ? "" : `rank ${rank}`;
    context.fillText(label, 0, laneTop(timeline, number, rank) + timeline.lane / 2);
  }
  context.save();
  context.beginPath();
  context.rect(LABEL, top, width - LABEL, panelHeight(timeline));
  context.clip();
  context.fillStyle = look.idle;
  for (const rank of lanes.keys()) {
    const left = leftOf(timeline, 0);
    context.fillRect(left, laneTop(timeline, number, rank), leftOf(timeline, makespan) - left, timeline.lane);
  }
  for (const span of spans) drawSpan(timeline, context, number, span);
  const chosen = spans[timeline.chosen?.index];
  if (chosen) {
    const left = leftOf(timeline, chosen.start);
    context.strokeStyle = look.ink;
    context.lineWidth = 2.5;
    context.strokeRect(left, laneTop(timeline, number, chosen.rank), leftOf(timeline, chosen.end) - left, timeline.lane);
  }
  context.restore();
}

function drawSpan(timeline, context, number, span) {
  const { packed, lane } = timeline;
  if (span.end < timeline.from || span.start > timeline.to) return;
  const left = leftOf(timeline, span.start), length = leftOf(timeline, span.end) - left;
  const top = laneTop(timeline, number, span.rank);
  context.fillStyle = packed.colors[span.op][packed.chunks[span.stage]];
  context.fillRect(left, top, Math.max(0.5, length - (length > 4 ? 0.8 : 0)), lane);
  const texts = span.microBatch < 0 ? [span.op] : [`${span.op}${span.microBatch}`, `${span.microBatch}`];
  context.font = context.font.replace(/\d+px/, "10px");
  const from = Math.max(left, LABEL), to = Math.min(left + length, timeline.canvas.clientWidth);
  const text = lane < 11 ? undefined : texts.find((each) => context.measureText(each).width < to - from - 2);
  if (text) {
    context.fillStyle = "#111"; // every colour of an op is light enough for it, in both themes
    context.fillText(text, (from + to - context.measureText(text).width) / 2, top + lane / 2 + 0.5);
  }
}

function drawAxis(timeline, context, look, width, height) {
  const rough = (timeline.to - timeline.from) / Math.max(2, (width - LABEL) / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step * 1e3)));
  context.font = context.font.replace(/\d+px/, "11px");
  for (let tick = Math.ceil(timeline.from / step); tick * step <= timeline.to; tick++) {
    const x = leftOf(timeline, tick * step);
    context.fillStyle = look.rule;
    context.fillRect(x, height - AXIS, 1, 5);
    context.fillStyle = look.muted;
    const text = `${(tick * step * 1e3).toFixed(digits)} ms`;
    context.fillText(text, Math.min(x, width - context.measureText(text).width), height - AXIS / 2 + 3);
  }
}

// What is seen and chosen

function show(timeline, from, to) {
  const length = Math.min(timeline.total, Math.max(timeline.total / MOST_ZOOM, to - from));
  timeline.from = Math.min(Math.max(0, from), timeline.total - length);
  timeline.to = timeline.from + length;
  timeline.redraw();
}

// Makes what is seen `factor` times as long around a time: that of what is chosen, or the middle.
function zoom(timeline, factor, around) {
  const { chosen, from, to, panels } = timeline;
  const span = chosen && panels[chosen.panel].spans[chosen.index];
  const fixed = around ?? (span ? (span.start + span.end) / 2 : (from + to) / 2);
  show(timeline, fixed - (fixed - from) * factor, fixed + (to - fixed) * factor);
}

function choose(timeline, found) {
  timeline.chosen = found?.span ? { panel: found.panel, index: found.span.index } : null;
  timeline.tip.replaceChildren(...linesOf(timeline, found).map((line) => element("div", { textContent: line })));
  timeline.redraw();
  if (found) placeTip(timeline, found);
}

function linesOf(timeline, found) {
  if (!found) return [];
  const { panels, words } = timeline;
  const told = ({ start, end }) => `${milliseconds(end - start)} ms, from ${milliseconds(start)} ms`;
  if (found.pause) {
    const { rank, start, end, next } = found.pause;
    const until = next ? `, before ${next.stage}${next.op}${next.microBatch < 0 ? "" : next.microBatch}` : "";
    return [`idle, rank ${rank}`, `${panels[found.panel].title}: ${told({ start, end })}${until}`];
  }
  const { index, op, stage, microBatch, rank } = found.span;
  const what = microBatch < 0 ? "" : `, micro-batch ${microBatch}`;
  return [
    `${words[op]}, stage ${stage}${what}, rank ${rank}`,
    ...panels.map(({ title, spans }) => `${title}: ${told(spans[index])}`),
  ];
}

function placeTip(timeline, found) {
  const { tip, canvas } = timeline;
  const { rank, start, end } = found.span ?? found.pause;
  const seen = [Math.max(LABEL, leftOf(timeline, start)), Math.min(canvas.clientWidth, leftOf(timeline, end))];
  const left = (seen[0] + seen[1] - tip.offsetWidth) / 2;
  tip.style.left = `${Math.max(0, Math.min(left, canvas.clientWidth - tip.offsetWidth))}px`;
  tip.style.top = `${canvas.offsetTop + laneTop(timeline, found.panel, rank) + timeline.lane + 6}px`;
}

// Pointer, wheel and keys

function listen(timeline) {
  const { canvas } = timeline;
  const pointers = new Map();
  const place = (event) => [event.offsetX, event.offsetY];
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(event));
    choose(timeline, at(timeline, ...place(event)));
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return choose(timeline, at(timeline, ...place(event)));
    const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, where]) => where);
    pointers.set(event.pointerId, place(event));
    if (others.length) return pinch(timeline, before[0], event.offsetX, others[0][0]);
    const moved = (before[0] - event.offsetX) / perSecond(timeline);
    return show(timeline, timeline.from + moved, timeline.to + moved);
  });
  const released = (event) => pointers.delete(event.pointerId);
  canvas.addEventListener("pointerup", released);
  canvas.addEventListener("pointercancel", released);
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && choose(timeline, null));
  canvas.addEventListener("blur", () => choose(timeline, null));
  canvas.addEventListener("dblclick", () => show(timeline, 0, timeline.total));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(timeline, Math.exp(event.deltaY / 200), timeAt(timeline, event.offsetX));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key](timeline);
  });
}

// Two fingers: their distance says how much is seen, the one that rests keeps its place.
function pinch(timeline, before, now, other) {
  if (Math.abs(now - other) < 8) return;
  zoom(timeline, Math.abs(before - other) / Math.abs(now - other), timeAt(timeline, other));
}

const KEYS = {
  ArrowRight: (timeline) => step(timeline, 1),
  ArrowLeft: (timeline) => step(timeline, -1),
  ArrowDown: (timeline) => changeLane(timeline, 1),
  ArrowUp: (timeline) => changeLane(timeline, -1),
  "+": (timeline) => zoom(timeline, 1 / 2),
  "=": (timeline) => zoom(timeline, 1 / 2),
  "-": (timeline) => zoom(timeline, 2),
  0: (timeline) => show(timeline, 0, timeline.total),
  Escape: (timeline) => choose(timeline, null),
};

// Chooses the action `offset` further on in the same rank, the first one of all where none is chosen.
function step(timeline, offset) {
  const { chosen, panels } = timeline;
  if (!chosen) return goTo(timeline, 0, panels[0].spans[0]);
  const now = panels[chosen.panel].spans[chosen.index];
  const next = panels[chosen.panel].spans[chosen.index + offset];
  return next?.rank === now.rank ? goTo(timeline, chosen.panel, next) : undefined;
}

// Chooses what is nearest in time in the lane `offset` below, over from the step to its replay.
function changeLane(timeline, offset) {
  const { chosen, panels } = timeline;
  if (!chosen) return goTo(timeline, 0, panels[0].spans[0]);
  const lanes = panels.flatMap(({ lanes }, number) => lanes.map((lane) => ({ number, lane })));
  const now = panels[chosen.panel].spans[chosen.index];
  const target = lanes[chosen.panel * panels[0].lanes.length + now.rank + offset];
  if (!target) return undefined;
  const distance = (span) => Math.abs(span.start + span.end - now.start - now.end);
  return goTo(timeline, target.number, target.lane.reduce((a, b) => (distance(b) < distance(a) ? b : a)));
}

function goTo(timeline, panel, span) {
  if (span.start < timeline.from || span.end > timeline.to) {
    const middle = (span.start + span.end) / 2, half = (timeline.to - timeline.from) / 2;
    show(timeline, middle - half, middle + half);
  }
  choose(timeline, { panel, span });
}
