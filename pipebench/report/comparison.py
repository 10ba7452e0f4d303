"""Two sweeps set side by side: which points are the same, whether they may be compared, and a verdict on each.

A is the baseline, B the candidate. A verdict is about step time alone.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from pipebench.config import NOT_PART_OF_THE_POINT, RESOLVED_BY_THE_MACHINE, RunConfig, key_of, ranks_per_device
from pipebench.errors import CompareError
from pipebench.machine import Machine, machine_class
from pipebench.metrics import Ratio, ratio_of_medians
from pipebench.record import RunResult, one_line_errors, step_groups
from pipebench.report.noise import in_words, noise_of
from pipebench.report.sweep import Sweep
from pipebench.report.tables import point_name
from pipebench.rows import COMPARABLE, Row
from pipebench.schedule.catalogue import is_file

LEAST_FLOOR = 1.01
"""The noise floor where neither sweep measured one, or only a lower one: minutes say too little about days."""

_ROUNDING = 1 + 1e-9
"""The noise floor of simulated points: nothing ran, so their times are exact."""


class Verdict(Enum):
    """What became of a point from A to B, the worst first."""

    BROKEN = "broken"
    SLOWER = "slower"
    UNDECIDED = "undecided"
    NO_RESULT = "no result"
    SAME = "same"
    FASTER = "faster"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Pair:
    """One point in both sweeps; `ratio` is B's median step time over A's, None where one of them has no result."""

    name: str
    a: Row
    b: Row
    ratio: Ratio | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Difference:
    """What makes two sweeps no fair comparison: `name` is the word that permits it, a and b what each of them has."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs, the worst first; names of points that only one sweep has; differences that were permitted.

    `floor` is the noise floor that the verdicts on real runs used, a ratio of at least 1; `noise` says in words what A
    and B measured of it, and `assumed` that neither knows.
    """

    pairs: list[Pair]
    only_a: list[str]
    only_b: list[str]
    differences: list[Difference]
    floor: float
    assumed: bool
    noise: tuple[str, str]


def compare(a: Sweep, b: Sweep, permitted: Collection[str]) -> Comparison:
    """Judge every point that both sweeps have.

    `permitted` names what may differ: machine, torch, ranks. Raise CompareError when something else does, or when
    there is no such point.
    """
    differences = _differing_environments(a, b)
    _refuse(differences, permitted)
    partner = _partners(a, b, across_machines=any(difference.name == "machine" for difference in differences))
    if not partner:
        raise CompareError(_nothing_in_common(a, b))
    differences += _differing_ranks(a, b, partner)
    _refuse(differences, permitted)
    floors = [noise.floor for noise in (noise_of(a), noise_of(b)) if noise]
    floor = max([LEAST_FLOOR, *floors])
    rows_a, rows_b = _rows_by_key(a), _rows_by_key(b)
    pairs = []
    for key, other in partner.items():
        ratio, verdict = _judged(a.results.get(key), b.results.get(other), floor)
        pairs.append(Pair(_name(key, rows_a), rows_a[key], rows_b[other], ratio, verdict))
    order = list(Verdict)
    pairs.sort(key=lambda pair: (order.index(pair.verdict), -pair.ratio.value if pair.ratio else 0.0))
    only_a = [_name(key, rows_a) for key in rows_a if key not in partner]
    only_b = [_name(key, rows_b) for key in rows_b if key not in partner.values()]
    noise = in_words(a, list(rows_a.values())), in_words(b, list(rows_b.values()))
    return Comparison(pairs, only_a, only_b, differences, floor, not floors, noise)


def _rows_by_key(sweep: Sweep) -> dict[str, Row]:
    return {row["key"]: row for row in sweep.rows}


def _name(key: str, rows: Mapping[str, Row]) -> str:
    return point_name(rows[key], list(rows.values()))


def verdict_on(ratio: Ratio, floor: float) -> Verdict:
    """Return slower or faster for a difference that is sure and above the floor, same for one that is below it.

    For the same, the interval must not reach beyond twice the floor: a point of more scatter than the A/A pair had is
    undecided. Within the floor itself it would lie for two points of three only, were B the very same code: the
    floor is where such an interval ends.
    """
    if ratio.low > 1 and ratio.value > floor:
        return Verdict.SLOWER
    if ratio.high < 1 and ratio.value < 1 / floor:
        return Verdict.FASTER
    below = 1 / floor <= ratio.value <= floor and 1 / floor**2 <= ratio.low and ratio.high <= floor**2
    return Verdict.SAME if below else Verdict.UNDECIDED


def _judged(a: RunResult | None, b: RunResult | None, floor: float) -> tuple[Ratio | None, Verdict]:
    """None stands for a point that was not run: then nothing can be said of the other."""
    a_fine, b_fine = (result is not None and result.status in COMPARABLE for result in (a, b))
    if a is None or b is None:
        return None, Verdict.UNDECIDED if a_fine or b_fine else Verdict.NO_RESULT
    if a_fine and b_fine:
        with one_line_errors(b.key):
            ratio = ratio_of_medians(step_groups(b), step_groups(a))
        return ratio, verdict_on(ratio, _ROUNDING if {a.status, b.status} == {"simulated"} else floor)
    return None, Verdict.BROKEN if a_fine else Verdict.FIXED if b_fine else Verdict.NO_RESULT


def _partners(a: Sweep, b: Sweep, *, across_machines: bool) -> dict[str, str]:
    """Return the keys of A's points that B has too, each with its key in B.

    Across machines the rest is paired by the configuration without what the machine resolved. Rows and costs from
    files have the key alone, since their files may not be here.
    """
    partner = {key: key for key in a.points if key in b.points}
    if not across_machines:
        return partner
    resolved = [name for name in RESOLVED_BY_THE_MACHINE if name not in (*a.swept, *b.swept)]

    def without_machine(sweep: Sweep) -> dict[str, str]:
        rest = {key: config for key, config in sweep.points.items() if key not in partner}
        with one_line_errors(sweep.name):
            return {key_of(config, resolved): key for key, config in rest.items() if not _reads_a_file(config)}

    there = without_machine(b)
    found = {key: there[free] for free, key in without_machine(a).items() if free in there}
    return partner | found


def _reads_a_file(config: RunConfig) -> bool:
    return is_file(config.schedule) or config.profile is not None


def _nothing_in_common(a: Sweep, b: Sweep) -> str:
    """Say which settings no point of A shares with a point of B."""

    def met(sweep: Sweep, name: str) -> set[str]:
        return {str(getattr(config, name)) for config in sweep.points.values()}

    names = [name for name in RunConfig.__dataclass_fields__ if name not in NOT_PART_OF_THE_POINT]
    differing = [name for name in names if not met(a, name) & met(b, name)]
    why = f"; all differ in {', '.join(differing)}" if differing else ""
    return f"none of A's {len(a.points)} points is among B's {len(b.points)}: expected the same settings{why}"


def _refuse(differences: Iterable[Difference], permitted: Collection[str]) -> None:
    refused = [difference for difference in differences if difference.name not in permitted]
    if refused:
        found = "; ".join(f"{each.name}: A has {each.a}, B has {each.b}" for each in refused)
        flags = ",".join([*permitted, *(each.name for each in refused)])
        raise CompareError(f"{found}: expected the same, or --across {flags}")


def _machine(result: RunResult) -> str:
    return machine_class(result.environment)


def _torch(result: RunResult) -> str:
    return str(result.environment["torch"])


ENVIRONMENT: dict[str, Callable[[RunResult], str]] = {"machine": _machine, "torch": _torch}
"""What all points of a sweep have in common, by the word that permits it to differ."""

ACROSS = (*ENVIRONMENT, "ranks")
"""Everything that may be permitted to differ."""


def environment_of(sweep: Sweep, name: str) -> str:
    """Return what the points that ran had, several where they differ; empty when none ran."""
    ran = [each for each in sweep.results.values() if each.config.engine != "simulate" and each.environment]
    with one_line_errors(sweep.folder):
        return " / ".join(dict.fromkeys(ENVIRONMENT[name](result) for result in ran))


def _differing_environments(a: Sweep, b: Sweep) -> list[Difference]:
    each = [Difference(name, environment_of(a, name), environment_of(b, name)) for name in ENVIRONMENT]
    return [found for found in each if found.a and found.b and found.a != found.b]


def _differing_ranks(a: Sweep, b: Sweep, partner: Mapping[str, str]) -> list[Difference]:
    """Return the first pair whose ranks shared devices differently: one says what is wrong with all."""
    for key, other in partner.items():
        if all(result and result.environment for result in (a.results.get(key), b.results.get(other))):
            here, there = _ranks_per_device(a.results[key]), _ranks_per_device(b.results[other])
            if here != there:
                where = f"at K={a.points[key].stages}, M={a.points[key].micro}"
                return [Difference("ranks", f"{here:g} a device {where}", f"{there:g}")]
    return []


def _ranks_per_device(result: RunResult) -> float:
    known = result.environment
    with one_line_errors(result.key):
        return ranks_per_device(result.config, Machine(num_cores=known["cores"], num_gpus=known.get("gpus", 0)))
