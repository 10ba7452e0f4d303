"""At a glance: what a sweep was run to find out, each answer in a line with the sentences behind it.

Answers are drawn from comparable points alone; simulated ones count only where nothing was measured. Two points whose
95 % intervals overlap are not told apart, and the page says so rather than rank them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipebench.grid import varying
from pipebench.ledger import PARTS, part_name
from pipebench.report.cells import LEGEND, bubble, digits, kind, mebibytes, with_interval
from pipebench.report.tables import point_name
from pipebench.rows import COMPARABLE, Row

WORTH_FRACTION = 0.05
"""A slower point is worth choosing where it takes at least this much less memory than the one before it."""

_MOST_NAMED = 3
"""Points or parts that a sentence names; the tables have the rest."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The `answer` to a `question` in a line, `because` in sentences; `keys` of the points named, foremost first."""

    question: str
    answer: str
    because: str
    keys: tuple[str, ...]


def at_a_glance(rows: Sequence[Row]) -> list[Answer]:
    """Return the answers that the rows allow: none where no point is a result."""
    results = judged(rows)
    if not results:
        return []
    names = {row["key"]: point_name(row, rows) for row in rows}
    questions = (_fastest, _bound, _lost, _memory, _choice)
    return [answer for question in questions if (answer := question(results, names)) is not None]


def judged(rows: Sequence[Row]) -> list[Row]:
    """Return the comparable points: the measured ones, or the simulated ones where there are no others."""
    results = [row for row in rows if row["status"] in COMPARABLE]
    return [row for row in results if row["status"] != "simulated"] or results


def level_with(row: Row, results: Sequence[Row]) -> list[Row]:
    """Return the other points whose interval of speed overlaps that of `row`, fastest first."""
    speed = _speed(results)
    slowest, fastest = _interval(row, speed)
    level = [
        other
        for other in results
        if other is not row and _interval(other, speed)[1] >= slowest and _interval(other, speed)[0] <= fastest
    ]
    return sorted(level, key=speed, reverse=True)


def lighter(row: Row, results: Sequence[Row]) -> list[Row]:
    """Return the points to choose for less memory than `row`, fastest first, each much lighter than the one before."""
    front: list[Row] = []
    least = row["peak_memory_bytes"]
    for other in sorted(results, key=_speed(results), reverse=True):
        if other["peak_memory_bytes"] <= (1 - WORTH_FRACTION) * least:
            front.append(other)
            least = other["peak_memory_bytes"]
    return front


Names = dict[str, str]
"""What to call each point, by its key."""


def _by_speed_up(results: Sequence[Row]) -> bool:
    """Tell whether speeds must be seen against one device each: samples of different models are not alike."""
    return bool(_of_model(results)) and all(row["speedup"] is not None for row in results)


def _of_model(results: Sequence[Row]) -> list[str]:
    """Return the columns in which the models differ."""
    return [name for name in varying(results) if name.startswith("model")]


def _speed(results: Sequence[Row]) -> Callable[[Row], float]:
    column = "speedup" if _by_speed_up(results) else "samples_per_s"
    return lambda row: float(row[column])


def _interval(row: Row, speed: Callable[[Row], float]) -> tuple[float, float]:
    """Return the speed at the ends of the step time's interval, lower first."""
    work = speed(row) * row["step_s"]
    return work / row["step_ci_high_s"], work / row["step_ci_low_s"]


def _fastest(results: Sequence[Row], names: Names) -> Answer:
    row = max(results, key=_speed(results))
    rate = f"{digits(row['samples_per_s'])} samples/s"
    answer = rate if row["speedup"] is None else f"{rate}, {digits(row['speedup'])} times one device"
    because = f"{names[row['key']]}{kind(row)}: {with_interval(row)} ms a step."
    if _by_speed_up(results):
        because += " Judged by speed-up, since the models differ."
    level = level_with(row, results)
    if level:
        because += f" Not told apart from it, as 95 % intervals overlap: {_listed(level, names)}."
    if row["oversubscribed"]:
        because += f" It is {LEGEND['*']}."
    if not row["steady"]:
        because += f" It is {LEGEND['~']}."
    return Answer("Fastest", answer, because, _keys([row, *level]))


def _bound(results: Sequence[Row], names: Names) -> Answer | None:
    traced = [row for row in results if row["bubble_fraction"] is not None]
    if not traced:
        return None
    row = max(traced, key=_speed(results))
    among = "the fastest" if len(traced) == len(results) else "the fastest whose spans are known"
    steps = [
        f"Of {names[row['key']]}, {among}, measured / replayed / bound:",
        f"measured is {_against(row['bubble_fraction'], row['bubble_replayed'])} replayed (overhead and contention),",
    ]
    if row["bubble_bound"] is None:
        steps += [f"and no bound is known for {row['schedule']} here."]
    else:
        steps += [f"which is {_against(row['bubble_replayed'], row['bubble_bound'])} the bound (imbalance, transfers)."]
    known = [each for each in traced if each["bubble_bound"] is not None]
    nearest = min(known, key=_from_bound, default=None)
    if nearest is not None:
        steps += [f"Nearest to its bound: {names[nearest['key']]}, {bubble(nearest, ' / ')}."]
    if any(each["oversubscribed"] for each in known):
        steps += ["Where stages share cores, replayed counts instead of measured."]
    keys = _keys([row] if nearest is None else [row, nearest])
    return Answer("Bubble against the bound", bubble(row, " / "), " ".join(steps), keys)


def _from_bound(row: Row) -> float:
    """Return how far from its bound a point idles; where its ranks shared cores, as it would on its own."""
    bubble_fraction = row["bubble_replayed"] if row["oversubscribed"] else row["bubble_fraction"]
    return abs(float(bubble_fraction) - float(row["bubble_bound"]))


def _against(value: float, other: float) -> str:
    return f"{abs(value - other):.3f} {'above' if value >= other else 'below'}"


def _lost(results: Sequence[Row], names: Names) -> Answer | None:
    told = [row for row in results if row["ledger_compute_s"] is not None]
    if not told:
        return None
    shares = {part: [row[f"ledger_{part}"] / row["step_s"] for row in told] for part in PARTS}
    eaters = sorted((part for part in PARTS if part != "compute_s"), key=lambda part: -fmean(shares[part]))
    largest = eaters[0]
    worst = max(told, key=lambda row: row[f"ledger_{largest}"] / row["step_s"])
    told_of = [part for part in eaters if fmean(shares[part]) >= 0.005][:_MOST_NAMED]
    listed = ", ".join(f"{part_name(part)} {_percent(shares[part])}" for part in told_of or [largest])
    mean = "Mean shares of the step" if len(told) > 1 else "Shares of the step"
    because = f"{mean}: compute {_percent(shares['compute_s'])}; {listed}."
    if len(told) > 1:
        because += f" Most {part_name(largest)}: {names[worst['key']]}."
    answer = f"{part_name(largest).capitalize()}, {fmean(shares[largest]):.0%} of the step"
    return Answer("What eats the rest", answer, because, _keys([worst]))


def _percent(shares: Sequence[float]) -> str:
    """Return the mean share, and from where to where it goes."""
    mean, lowest, highest = (
        f"{round(share, 2) + 0.0:.0%}"
        for share in (fmean(shares), min(shares), max(shares))  # no -0 %
    )
    return mean if lowest == highest else f"{mean} ({lowest} to {highest})"


def _memory(results: Sequence[Row], names: Names) -> Answer:
    least = min(results, key=lambda row: row["peak_memory_bytes"])
    fastest = max(results, key=_speed(results))
    answer = f"{mebibytes(fastest['peak_memory_bytes'])} MiB for the fastest"
    because = "Peak of the largest stage."
    if least["peak_memory_bytes"] == fastest["peak_memory_bytes"]:
        return Answer("Memory", answer, f"{because} No point takes less.", _keys([fastest]))
    ratio = least["peak_memory_bytes"] / fastest["peak_memory_bytes"]
    because += f" {names[least['key']]} takes least: {mebibytes(least['peak_memory_bytes'])} MiB, {ratio:.3f} of that."
    return Answer("Memory", answer, because, _keys([least, fastest]))


def _choice(results: Sequence[Row], names: Names) -> Answer | None:
    """Answer with the lightest of the points that are fastest as far as can be told, and what less memory costs."""
    if len(results) == 1:
        return None
    by_model = _by_model(results)
    if len(by_model) > 1:
        chosen_of_each = [_chosen(members) for members in by_model]
        because = f"The fastest of each, or the lightest as fast as can be told: {_listed(chosen_of_each, names)}."
        return Answer("What to choose", f"One point for each of {len(by_model)} models", because, _keys(chosen_of_each))
    fastest, chosen = max(results, key=_speed(results)), _chosen(results)
    if chosen is fastest:
        because = "The fastest."
    else:
        because = (
            f"Not told apart from {names[fastest['key']]}, the fastest, and lighter: "
            f"{mebibytes(chosen['peak_memory_bytes'])} MiB instead of {mebibytes(fastest['peak_memory_bytes'])}."
        )
    cheaper = lighter(chosen, results)
    if cheaper:
        because += f" For less memory: {_listed(cheaper, names, _speed_and_memory)}."
    else:
        because += f" None takes {WORTH_FRACTION:.0%} less memory."
    return Answer("What to choose", names[chosen["key"]], because, _keys([chosen, *cheaper]))


def _chosen(results: Sequence[Row]) -> Row:
    fastest = max(results, key=_speed(results))
    return min([fastest, *level_with(fastest, results)], key=lambda row: float(row["peak_memory_bytes"]))


def _by_model(results: Sequence[Row]) -> list[list[Row]]:
    names = _of_model(results)
    models: dict[str, list[Row]] = {}
    for row in results:
        models.setdefault(str([row[name] for name in names]), []).append(row)
    return list(models.values())


def _speed_and_memory(row: Row) -> str:
    return f" ({digits(row['samples_per_s'])} samples/s, {mebibytes(row['peak_memory_bytes'])} MiB)"


def _listed(rows: Sequence[Row], names: Names, more: Callable[[Row], str] = lambda row: "") -> str:
    listed = "; ".join(names[row["key"]] + more(row) for row in rows[:_MOST_NAMED])
    return listed if len(rows) <= _MOST_NAMED else f"{listed}; and {len(rows) - _MOST_NAMED} more"


def _keys(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row["key"] for row in rows))
