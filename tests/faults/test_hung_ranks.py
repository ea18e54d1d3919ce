"""FAULTS 7: the error names a rank that hangs, and the collective that waits for it.

A rank that is only slow is named too, and nothing ends.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import children_of, num_lines, output_of, start_txl, wait_until
from tests.support.training_runs import NO_EVALUATION, ZERO, TinyRuns, losses, train, train_words
from txl_dist.checkpoint.checkpoints import Checkpoints, Save
from txl_dist.checkpoint.tensors import Snapshot
from txl_dist.errors import LostRankError
from txl_dist.runtime.waiting import CollectiveWatch
from txl_dist.runtime.world import World
from txl_dist.training import batches, rank
from txl_dist.training.rank import train_rank
from txl_dist.training.spec import TrainSpec
from txl_dist.training.step import TrainStep

pytestmark = pytest.mark.fault

LIMIT_SECONDS = 4
LIMIT_OF_PROCESSES_SECONDS = 10
"""Longer, because the ranks also have to meet at their start within it."""
LIMIT = f"training.rank_timeout_seconds={LIMIT_OF_PROCESSES_SECONDS}"
SETTINGS = (NO_EVALUATION, "tracking.enabled=false", LIMIT)


@pytest.mark.fault_row(7)
def test_a_stopped_rank_is_named_with_the_collective(dataset: Path, tmp_path: Path) -> None:
    endless = ("training.num_steps=100000", "training.checkpoint_interval_steps=100000")
    process = start_txl(*train_words(dataset, tmp_path, *SETTINGS, *endless))
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 5, timeout_seconds=180)
    stopped = children_of(process.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    output = output_of(process, 1, timeout_seconds=120)
    assert time.monotonic() - began < LIMIT_OF_PROCESSES_SECONDS + 30
    assert "rank 1 hung and was killed" in output
    assert f"rank 0 waited {LIMIT}" in output
    assert "for the other ranks in " in output
    assert "There is no checkpoint in" in output
    assert "Traceback" not in output
    # In the error, and in the log before the limit.
    name = rf"rank 1 \(host \S+, pid {stopped}\) has not responded for \d+ s \(last in "
    error = output.rpartition("rank 1 hung and was killed")[2]
    assert re.search(name, error), output
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    notice, _, _ = log.partition("rank 0 waited")
    assert re.search(rf"rank 0 has waited .*{name}", notice), log


@pytest.mark.fault_row(7)
def test_a_rank_that_hangs_while_the_engine_is_built_ends_the_run(
    dataset: Path, tmp_path: Path
) -> None:
    """DeepSpeed creates process groups there, with a time limit of 30 minutes by default."""
    words = train_words(dataset, tmp_path, *SETTINGS)
    process = start_txl(*words, environment={"TXL_FAULT": "engine:stop:1:1"})
    output = output_of(process, 1, timeout_seconds=120)
    assert "rank 1 hung and was killed" in output
    assert re.search(r"rank 0 waited .* for the other ranks in \w+ \(start-up\)", output), output


def stall_in_backward(world: World, spec: TrainSpec) -> str | None:
    """Rank 1 does not join the reduction of step 3; returns the error of this rank."""
    original = TrainStep._micro_batches

    def stalling(self: TrainStep, *args: object, **options: object) -> object:
        if world.rank == 1 and options["step"] == 3:
            wait_until((spec.run_path / "noticed").exists)
        return original(self, *args, **options)  # type: ignore[arg-type]

    TrainStep._micro_batches = stalling  # type: ignore[assignment,method-assign]
    try:
        train_rank(spec, world)
    except LostRankError as error:
        (spec.run_path / "noticed").touch()
        return str(error)
    finally:
        TrainStep._micro_batches = original  # type: ignore[method-assign]
    return None


@pytest.mark.fault_row(7)
@pytest.mark.parametrize("stage", ZERO)
def test_the_limit_reaches_the_gradients_at_every_stage(tiny: TinyRuns, stage: str) -> None:
    limit = f"training.rank_timeout_seconds={LIMIT_SECONDS}"
    spec = tiny.spec(tiny.path, NO_EVALUATION, *ZERO[stage], limit)
    group = tiny.ranks(2)
    message, _ = group.run(stall_in_backward, spec)
    group.is_broken = True
    assert message is not None
    assert message.startswith(f"rank 0 waited {limit} for the other ranks in ")
    assert "(step 3)" in message


def train_slowly(world: World, spec: TrainSpec, *, slow: str) -> int:
    """Rank 1 needs 4 s for data of step 3 or to copy a checkpoint, or rank 0 8 s to write it."""
    write = Checkpoints.write_part
    pipeline = batches.pipeline

    def slow_batches(*args: Any) -> Iterator[Any]:
        for number, batch in enumerate(pipeline(*args), start=1):
            time.sleep(4 if number == 3 and world.rank == 1 and slow == "data" else 0)
            yield batch

    def slow_snapshot(*args: Any) -> Snapshot:
        time.sleep(4 if world.rank == 1 and slow == "save" else 0)
        return Snapshot(*args)

    def slow_write(checkpoints: Checkpoints, save: Save, snapshot: Snapshot) -> None:
        for _ in range(8 if world.rank == 0 and slow == "write" else 0):
            time.sleep(1)
            save.require_useful()  # called for every block
        write(checkpoints, save, snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "pipeline", slow_batches)
        patch.setattr("txl_dist.training.saving.Snapshot", slow_snapshot)
        patch.setattr(Checkpoints, "write_part", slow_write)
        patch.setattr(rank, "CollectiveWatch", partial(CollectiveWatch, notice_seconds=1.0))
        return train(world, spec)


@pytest.mark.parametrize(
    ("slow", "place"),
    [
        ("data", r"step 3, data wait for \d s: "),
        ("save", r"checkpoint of step 6, save wait for \d s"),
        ("write", None),
    ],
)
def test_a_slow_rank_is_named_and_nothing_ends(
    tiny: TinyRuns, slow: str, place: str | None
) -> None:
    """Ranks that wait for a file to be written are not slow, and nothing waits for them."""
    plain, run = tiny.path / "plain", tiny.path / "run"
    settings = (NO_EVALUATION, "training.num_steps=6", "training.rank_timeout_seconds=6")
    tiny.trained(plain, *settings)
    assert tiny.ranks(2).run(train_slowly, tiny.spec(run, *settings), slow=slow) == [0, 0]
    assert losses(run) == losses(plain)
    log = (run / "logs" / "rank-0.log").read_text()
    waits = re.findall(r"rank 0 has waited .*", log)
    if place is None:
        assert not waits
    else:
        name = rf"rank 1 \(host \S+, pid \d+\) has been in {place}"
        assert re.search(name, "\n".join(waits)), log
    assert "has not responded" not in log
