"""At a glance: what a sweep was run to find out, each answer in a line with the sentences behind it.

Answers are drawn from comparable points alone; simulated ones count only where nothing was measured. Two points whose
95 % intervals overlap, or that lie closer together than the sweep's noise floor, are not told apart, and the page says
so rather than rank them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipebench.grid import varying
from pipebench.ledger import PARTS, part_name
from pipebench.report.cells import (
    LEGEND,
    bubble,
    digits,
    kind,
    marks,
    measured_or_simulated,
    mebibytes,
    milliseconds,
    with_interval,
)
from pipebench.report.tables import point_name
from pipebench.rows import COMPARABLE, Row

WORTH_FRACTION = 0.05
"""A slower point is worth choosing where it takes at least this much less memory than the one before it."""

_WORTH_NAMING = 0.005
"""Share of the step from which a part of the ledger is named."""

_MOST_NAMED = 3
"""Points or parts that a sentence names; the tables have the rest."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The `answer` to a `question` in a line, `because` in sentences; `keys` of the points named, foremost first."""

    question: str
    answer: str
    because: str
    keys: tuple[str, ...]


def at_a_glance(rows: Sequence[Row], floor: float = 1.0) -> list[Answer]:
    """Return the answers that the rows allow: none where no point is a result.

    `floor` is the sweep's noise floor, a ratio of step times of at least 1.
    """
    results = judged(rows)
    if not results:
        return []
    names = {row["key"]: point_name(row, rows) for row in rows}
    answers = [
        _fastest(results, names, floor),
        _bound(results, names),
        _lost(results, names),
        _memory(results, names),
        _choice(results, names, floor),
    ]
    return [answer for answer in answers if answer is not None]


def judged(rows: Sequence[Row]) -> list[Row]:
    """Return the comparable points: the measured ones, or the simulated ones where there are no others."""
    results = [row for row in rows if row["status"] in COMPARABLE]
    return [row for row in results if row["status"] != "simulated"] or results


def level_with(row: Row, results: Sequence[Row], floor: float = 1.0) -> list[Row]:
    """Return the points that cannot be told from the fastest, `row`: speeds overlap, or differ by noise alone."""
    speed = _speed(results)
    slowest, _ = _interval(row, speed)
    level = [
        other
        for other in results
        if other is not row and (_interval(other, speed)[1] >= slowest or speed(row) <= floor * speed(other))
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


def _fastest(results: Sequence[Row], names: Names, floor: float) -> Answer:
    row = max(results, key=_speed(results))
    rate = f"{digits(row['samples_per_s'])} samples/s"
    answer = rate if row["speedup"] is None else f"{rate}, {digits(row['speedup'])} times one device"
    because = f"{names[row['key']]}{kind(row)}: {with_interval(row)} ms a step."
    if _by_speed_up(results):
        because += " Judged by speed-up, since the models differ."
    if row["speedup"] is not None and row["speedup"] < 1:
        because += " One device is faster than any of these."
    level = level_with(row, results, floor)
    if level:
        because += f" Not told apart from it: {_listed(level, names)}."
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
    ran = measured_or_simulated([row])
    among = "the fastest" if len(traced) == len(results) else "the fastest whose spans are known"
    steps = [
        f"Of {names[row['key']]}, {among}, {ran} / replayed / bound:",
        f"{ran} is {_against(row['bubble_fraction'], row['bubble_replayed'])} replayed (overhead and contention),",
    ]
    if row["bubble_bound"] is None:
        steps += [f"and no bound is known for {row['schedule']} here."]
    else:
        steps += [f"which is {_against(row['bubble_replayed'], row['bubble_bound'])} the bound (imbalance, transfers)."]
    if row["oversubscribed"]:
        steps += ["Its stages share cores, so replayed says more than measured."]
    return Answer("Bubble against the bound", bubble(row, " / "), " ".join(steps), _keys([row]))


def _against(value: float, other: float) -> str:
    return f"{abs(value - other):.3f} {'above' if value >= other else 'below'}"


def _lost(results: Sequence[Row], names: Names) -> Answer | None:
    """Answer for the fastest point, beyond what its schedule idles by design; points differ too much for a mean."""
    told = [row for row in results if row["ledger_compute_s"] is not None]
    if not told:
        return None
    row = max(told, key=_speed(results))
    among = "" if len(told) == len(results) else ", the fastest whose spans are known"
    shares = {part: row[f"ledger_{part}"] / row["step_s"] for part in PARTS}
    beyond = [part for part in PARTS if part not in ("compute_s", "fill_and_drain_s")]
    largest = max(beyond, key=shares.__getitem__)
    listed = ", ".join(
        f"{part_name(part)} {shares[part]:.1%}"
        for part in sorted(beyond, key=lambda part: -shares[part])
        if shares[part] >= _WORTH_NAMING
    )
    because = (
        f"Of {names[row['key']]}{among}, {milliseconds(row['step_s'])} ms a step: compute {shares['compute_s']:.1%}, "
        f"{part_name('fill_and_drain_s')} {shares['fill_and_drain_s']:.1%}, {listed or 'nothing else large'}."
    )
    answer = f"{part_name(largest).capitalize()}, {shares[largest]:.1%} of the step"
    return Answer("What eats the rest", answer, because, _keys([row]))


def _memory(results: Sequence[Row], names: Names) -> Answer:
    least = min(results, key=lambda row: row["peak_memory_bytes"])
    fastest = max(results, key=_speed(results))
    answer = f"{mebibytes(fastest['peak_memory_bytes'])} MiB for the fastest"
    because = "Peak of the largest stage."
    if least["peak_memory_bytes"] == fastest["peak_memory_bytes"]:
        return Answer("Memory", answer, f"{because} No point takes less.", _keys([fastest]))
    ratio = least["peak_memory_bytes"] / fastest["peak_memory_bytes"]
    because += f" {names[least['key']]} takes least: {mebibytes(least['peak_memory_bytes'])} MiB, {ratio:.3f} of that."
    return Answer("Memory", answer, because, _keys([fastest, least]))


def _choice(results: Sequence[Row], names: Names, floor: float) -> Answer | None:
    """Answer with the lightest of the points that are fastest as far as can be told, and what less memory costs."""
    if len(results) == 1:
        return None
    by_model = _by_model(results)
    if len(by_model) > 1:
        chosen_of_each = [_chosen(members, floor) for members in by_model]
        because = f"The fastest of each, or the lightest as fast as can be told: {_listed(chosen_of_each, names)}."
        return Answer("What to choose", f"One point for each of {len(by_model)} models", because, _keys(chosen_of_each))
    fastest, chosen = max(results, key=_speed(results)), _chosen(results, floor)
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
    if chosen["oversubscribed"]:
        because += f" It is {LEGEND['*']}."
    if chosen["speedup"] is not None and chosen["speedup"] < 1:
        because += f" One device is faster: it takes {chosen['speedup']:.3f} of this step's time."
    return Answer("What to choose", names[chosen["key"]] + kind(chosen), because, _keys([chosen, *cheaper]))


def _chosen(results: Sequence[Row], floor: float) -> Row:
    """Return the fastest, or a point level with it that is much lighter and whose median is not much slower.

    A point that scatters widely is level with everything; that is no reason to choose it.
    """
    speed = _speed(results)
    fastest = max(results, key=speed)
    near = [row for row in level_with(fastest, results, floor) if speed(fastest) <= (1 + WORTH_FRACTION) * speed(row)]
    lightest = min([fastest, *near], key=lambda row: float(row["peak_memory_bytes"]))
    much = lightest["peak_memory_bytes"] <= (1 - WORTH_FRACTION) * fastest["peak_memory_bytes"]
    return lightest if much else fastest


def _by_model(results: Sequence[Row]) -> list[list[Row]]:
    names = _of_model(results)
    models: dict[str, list[Row]] = {}
    for row in results:
        models.setdefault(str([row[name] for name in names]), []).append(row)
    return list(models.values())


def _speed_and_memory(row: Row) -> str:
    return f" ({digits(row['samples_per_s'])} samples/s, {mebibytes(row['peak_memory_bytes'])} MiB)"


def _listed(rows: Sequence[Row], names: Names, more: Callable[[Row], str] = lambda row: "") -> str:
    listed = "; ".join(names[row["key"]] + marks(row) + more(row) for row in rows[:_MOST_NAMED])
    return listed if len(rows) <= _MOST_NAMED else f"{listed}; and {len(rows) - _MOST_NAMED} more"


def _keys(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row["key"] for row in rows))
