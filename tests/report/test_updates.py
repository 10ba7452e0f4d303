"""What a rank tells of its updates is kept, read and drawn; files from before there was any are read too."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hand_made import config, result

from pipebench.record import RunResult, UpdateRecord, config_from, read_result, write_result
from pipebench.tracking.curves import samples_of

UPDATES = [None, UpdateRecord(0.1, math.inf, 65536.0, skipped=True)]


def with_updates() -> RunResult:
    told = result("key", config())
    [repeat] = told.repeats
    first, *others = repeat.ranks
    ranks = [dataclasses.replace(first, updates=UPDATES), *others]
    return dataclasses.replace(told, repeats=[dataclasses.replace(repeat, ranks=ranks)])


def test_updates_survive_being_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, with_updates())
    assert read_result(path).repeats == with_updates().repeats


def test_a_step_that_only_accumulates_draws_nothing_and_an_overflow_no_norm() -> None:
    first, second = samples_of(with_updates())
    assert {"learning_rate", "loss_scale", "skipped", "gradient_norm"}.isdisjoint(first.values)
    drawn = {name: second.values.get(name) for name in ("learning_rate", "loss_scale", "skipped", "gradient_norm")}
    assert drawn == {"learning_rate": 0.1, "loss_scale": 65536.0, "skipped": 1.0, "gradient_norm": None}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_settings_of_an_old_result_are_todays_usual_ones(name: str) -> None:
    content = json.loads(json.dumps(dataclasses.asdict(config())))
    content["optimizer"] = {"name": name, "lr": 0.1}
    read = config_from(content).optimizer
    assert (read.weight_decay, read.clip_norm, read.accumulate, read.lr_schedule) == (None, None, 1, "constant")
