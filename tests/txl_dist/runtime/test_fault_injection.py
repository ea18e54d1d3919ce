"""Fault injection does nothing by default, acts at the named point, and its points exist."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.training_runs import TinyRuns, train
from txl_dist.errors import ConfigError
from txl_dist.runtime import fault_injection
from txl_dist.runtime.fault_injection import (
    FAULT_VARIABLE,
    POINTS,
    TRACE_VARIABLE,
    InjectedError,
    fault_point,
)
from txl_dist.runtime.world import World
from txl_dist.training.spec import TrainSpec


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "_num_reached", Counter())


def test_nothing_happens_without_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULT_VARIABLE, raising=False)
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    for point in POINTS:
        fault_point(point)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_fault_happens_at_its_point_once_on_its_rank(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv(FAULT_VARIABLE, "step:raise:2:1,evaluation:raise")
    failed = []
    for number, point in enumerate(("step", "step", "step", "evaluation", "evaluation")):
        try:
            fault_point(point)
        except InjectedError:
            failed.append(number)
    assert failed == ([1, 3] if rank == "1" else [3])


@pytest.mark.parametrize(
    "text", ["step", "nowhere:kill", "step:explode", "step:kill:0", "step:kill:1:x", "step:sleep="]
)
def test_an_invalid_fault_is_refused_with_what_is_legal(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, text)
    with pytest.raises(ConfigError, match=re.escape(repr(text)) + ".*save/manifest.*terminate"):
        fault_point("step")


def train_traced(world: World, spec: TrainSpec, trace: Path) -> int:
    os.environ[TRACE_VARIABLE] = str(trace)
    try:
        return train(world, spec)
    finally:
        del os.environ[TRACE_VARIABLE]


def test_a_run_and_its_resume_reach_every_point(tiny: TinyRuns) -> None:
    settings = ("training.num_steps=4", "optimizer.warmup_steps=2", "evaluation.max_tokens=20")
    spec = tiny.spec("run", *settings, "training.checkpoint_interval_steps=3")
    for _ in range(2):
        assert tiny.ranks(1).run(train_traced, spec, tiny.path / "trace") == [0]
    reached = [line.split()[-1] for line in (tiny.path / "trace").read_text().splitlines()]
    # No store and no change of lanes in this run.
    assert set(reached) == {*POINTS} - {"upload", "replay", "score"}
    assert reached.count("step") == 4
    assert reached.count("save/latest") == 2
