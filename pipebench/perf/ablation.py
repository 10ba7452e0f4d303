"""`make levers`: what each lever of the built-in engine brings, one changed at a time, all in one interleaved run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from pipebench.harness.sweep import make_folder
from pipebench.metrics import Ratio, paired_ratio
from pipebench.perf.targets import run_alone, two_points
from pipebench.record import step_times, write_json

LEVERS = {
    "sockets": "gloo over loopback instead of memory that the ranks share",
    "sockets_few_ahead": "the same, receives posted ahead only into memory that is needed anyway",
    "sockets_all_ahead": "the same, all receives posted as early as their order allows",
    "any_core": "ranks not bound to cores",
    "memory_given_back": "freed memory goes back to the kernel, buffers are faulted in anew",
    "foreach_optimizer": "the optimizer's foreach kernels instead of its fused one",
    "plain_optimizer": "one kernel for each parameter instead of its fused one",
    "public_backward": "torch.autograd.backward instead of its engine called directly",
    "weights_in_place": "weight gradients of linear layers added in place",
    "compiled_layers": "torch.compile of each layer",
}
"""What differs from the engine as it is, by the name of its function in `harness.levers`."""

_AS_IT_IS = "as_it_is"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipebench.perf.ablation", description="Measure each lever.")
    parser.add_argument("--repeats", type=int, default=5, help="fresh process groups per point and lever (default 5)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per group (default 10)")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where to keep what was measured")
    parser.add_argument("levers", nargs="*", help=f"which: {', '.join(LEVERS)} (default: all)")
    options = parser.parse_args(argv)
    if unknown := set(options.levers) - set(LEVERS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(LEVERS)}")
    folder = make_folder(options.results_dir, "levers")
    groups = _measure(options.levers or list(LEVERS), options.repeats, options.steps)
    write_json(folder / "levers.json", groups)
    text = _table(groups)
    (folder / "levers.md").write_text(text + "\n")
    print(text)
    print(f"\nraw files  {folder}")
    return 0


def _measure(levers: Sequence[str], repeats: int, steps: int) -> dict[str, dict[str, list[list[float]]]]:
    """Return seconds of each step of each group, by point and lever; every round runs all of them once."""
    points = two_points(f"steps={steps}", "warmup=6")
    groups: dict[str, dict[str, list[list[float]]]] = {name: {} for name in points}
    for round_number in range(repeats):
        for name, config in points.items():
            for lever in (_AS_IT_IS, *levers):
                print(f"round {round_number + 1} of {repeats}: {name}, {lever}", file=sys.stderr)
                ranks = run_alone(f"pipebench.harness.levers:{lever}", config)
                groups[name].setdefault(lever, []).append(step_times([record for record, _ in ranks]))
    return groups


def _table(groups: dict[str, dict[str, list[list[float]]]]) -> str:
    """Return Markdown: a row for each lever, the ratio of step times to the engine as it is for each point."""
    levers = [lever for lever in next(iter(groups.values())) if lever != _AS_IT_IS]
    rows = [
        (LEVERS[lever], *(_cell(paired_ratio(of[lever], of[_AS_IT_IS])) for of in groups.values())) for lever in levers
    ]
    return tabulate(rows, ("what differs: step time over the engine's as it is [95 %]", *groups), tablefmt="github")


def _cell(ratio: Ratio) -> str:
    """Return the ratio and what it says of the lever: nothing where the interval holds 1."""
    verdict = "worse" if ratio.low > 1 else "better" if ratio.high < 1 else "no difference seen"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] {verdict}"


if __name__ == "__main__":
    sys.exit(main())
