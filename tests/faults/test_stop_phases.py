"""FAULTS 5: a stop request in each phase of a run ends it with 75, and the next start resumes.

A rank blocks in one phase, in native code as far as possible, and is then signalled.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data_pipeline.conftest import bucket, s3_server  # noqa: F401 - fixtures
from tests.support.cloud_runs import aws, in_cloud  # noqa: F401 - aws is a fixture
from tests.support.commands import (
    ENVIRONMENT,
    children_of,
    output_of,
    start_torchrun,
    start_txl,
    txl,
    wait_until,
)
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import (
    NO_EVALUATION,
    TinyRuns,
    losses,
    tiny_spec,
    train,
    train_some,
    train_words,
)
from txl_dist.checkpoint import copies
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.runtime.world import World
from txl_dist.training import resume
from txl_dist.training import start as start_module
from txl_dist.training.rank import train_rank
from txl_dist.training.spec import TrainSpec
from txl_dist.training.step import TrainStep

pytestmark = pytest.mark.fault

GRACE_SECONDS = 2.0
SETTINGS = (NO_EVALUATION, f"training.grace_seconds={GRACE_SECONDS}")
SOON_SECONDS = 15.0
"""The goal is GRACE_SECONDS and less than a second more. Shared machines are slow."""
START_UP, LATER = "start-up", "later"


def block(marker: Path) -> None:
    """Minutes of native code, which releases Python's lock and does not check for signals."""
    marker.touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)


def block_before(owner: Any, name: str, marker: Path, *, when: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    def blocking(*args: Any, **options: Any) -> Any:
        if when(*args, **options):
            block(marker)
        return original(*args, **options)

    setattr(owner, name, blocking)


def always(*_: Any, **__: Any) -> bool:
    return True


PHASES: dict[str, tuple[str, Any, str, Callable[..., bool]]] = {
    "rendezvous": (START_UP, World, "join", always),
    "hashing": (START_UP, resume, "find_damage", always),
    "loading": (START_UP, TrainStep, "load_memory", always),
    # As a compilation of the model does.
    "first step": (START_UP, TrainStep, "_micro_batches", always),
    "later step": (LATER, TrainStep, "_micro_batches", lambda *_, step, **__: step == 9),
    "save": (LATER, CheckpointDirectory, "finish", lambda *arguments: arguments[-1] == 12),
    "replay": (START_UP, start_module, "fault_point", always),
    "upload": (LATER, copies, "fault_point", always),
}
"""Phase -> whether a step is completed before it, and the function that blocks in it."""
OTHER_SETTINGS = ("replay", "upload")
"""Phases with a test of their own, because they need other settings."""


def run_blocked(phase: str, spec_path: str, marker: str) -> None:
    _, owner, name, when = PHASES[phase]
    block_before(owner, name, Path(marker), when=when)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    spec = TrainSpec.from_json(Path(spec_path).read_bytes())
    train_rank(spec, World(0, 1))


def stop_in(phase: str, spec: TrainSpec, directory: Path) -> str:
    """Run a rank that blocks in `phase`, signal it, require code 75; returns its output and log."""
    spec_path, marker = directory / "spec.json", directory / "marker"
    spec_path.write_text(spec.to_json())
    call = f"run_blocked({phase!r}, {str(spec_path)!r}, {str(marker)!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.faults.test_stop_phases import run_blocked; {call}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        wait_until(lambda: marker.exists() or process.poll() is not None)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, output
    assert time.monotonic() - began < SOON_SECONDS
    return output + (spec.run_path / "logs" / "rank-0.log").read_text()


@pytest.mark.fault_row(5)
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in OTHER_SETTINGS])
def test_a_request_ends_the_phase_and_the_next_start_resumes(
    phase: str, tiny: TinyRuns, straight: Callable[..., Path]
) -> None:
    run = tiny.path / "run"
    spec = tiny.spec(run, *SETTINGS)
    is_start_up = PHASES[phase][0] == START_UP
    if is_start_up:  # a run to resume, which `train_some` has stopped in the middle
        assert tiny.ranks(1).run(train_some, spec, num_steps=8) == [1]
    output = stop_in(phase, spec, tiny.path)
    if is_start_up:
        assert "nothing is lost" in output
    else:
        assert re.search(r"the \d+ steps since the checkpoint of step 6 are lost", output), output
        assert f"training.grace_seconds={GRACE_SECONDS:g}" in output
    assert CheckpointDirectory(run).steps() == [6]
    assert tiny.ranks(1).run(train, spec) == [0]
    assert losses(run) == losses(straight(*SETTINGS, num_ranks=1))


@pytest.mark.fault_row(5)
def test_a_request_ends_a_replay_and_the_next_start_repeats_it(tiny: TinyRuns) -> None:
    run, undisturbed = tiny.path / "run", tiny.path / "undisturbed"
    assert tiny.ranks(1).run(train_some, tiny.spec(run, *SETTINGS), num_steps=8) == [1]
    shutil.copytree(run, undisturbed)
    spec, other_spec = (
        tiny.spec(each, *SETTINGS, "data.num_lanes=4", allow_change=("data.num_lanes",))
        for each in (run, undisturbed)
    )
    assert "nothing is lost" in stop_in("replay", spec, tiny.path)
    assert tiny.ranks(1).run(train, spec) == [0]
    assert tiny.ranks(1).run(train, other_spec) == [0]
    assert losses(run) == losses(undisturbed)


@pytest.mark.fault_row(5)
def test_a_request_ends_an_upload_and_the_next_start_repeats_it(
    ranks: RankGroups,
    dataset: Path,
    straight: Callable[..., Path],
    tmp_path: Path,
    aws: dict[str, str],  # noqa: F811
    bucket: Any,  # noqa: F811
) -> None:
    def copies() -> list[str]:
        bucket.invalidate_cache()
        paths: list[str] = bucket.glob("bucket/run/checkpoints/*/manifest.json")
        return paths

    spec = tiny_spec(
        dataset, tmp_path / "run", *SETTINGS, "training.checkpoint_url=s3://bucket/run"
    )
    output = stop_in("upload", spec, tmp_path)
    assert "while busy with: upload of checkpoints; no step is lost" in output
    assert not copies()
    assert ranks(1).run(in_cloud, aws, train, spec) == [0]
    assert copies()
    assert losses(spec.run_path) == losses(straight(*SETTINGS, num_ranks=1))


LONG = (*SETTINGS, "training.num_steps=400")


@pytest.mark.fault_row(5)
@pytest.mark.parametrize("start", [start_txl, start_torchrun])
def test_a_signal_to_one_rank_in_an_evaluation_ends_it_on_all(
    start: Callable[..., subprocess.Popen[str]], dataset: Path, tmp_path: Path
) -> None:
    """The other rank has not received it, and would score its share first, for half a minute."""
    settings = (
        "evaluation.split=train", "evaluation.batch_chunks=1", "data.tgt_len=1", "model.n_layer=6",
        "evaluation.interval_steps=10", "training.checkpoint_interval_steps=10",
        "training.grace_seconds=100",
    )  # fmt: skip
    words = train_words(dataset, tmp_path, *LONG, *settings)
    process = start(*(words if start is start_txl else words[:-4]))  # not --on and --ranks
    wait_until(CheckpointDirectory(tmp_path).at(10).is_dir)
    os.kill(children_of(process.pid)[1], signal.SIGTERM)
    began = time.monotonic()
    output, _ = process.communicate(timeout=90)
    if start is start_txl:
        assert process.returncode == 75, output
    else:  # torchrun does not pass on the codes of ranks
        assert output.count("exitcode  : 75") == 2, output
    assert time.monotonic() - began < SOON_SECONDS
    assert "stopped on request after step 10; everything is saved" in output
    assert not list(tmp_path.glob(".stop-*"))


def test_ranks_that_cannot_react_are_killed_after_the_grace_period(
    dataset: Path, tmp_path: Path
) -> None:
    words = train_words(dataset, tmp_path, *LONG)
    process = start_txl(*words)
    wait_until(lambda: CheckpointDirectory(tmp_path).steps() != [])
    for rank in children_of(process.pid):
        os.kill(rank, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output = output_of(process, 75, timeout_seconds=60)
    assert time.monotonic() - began < SOON_SECONDS
    assert "stopped on request, before all ranks had saved" in output
    finished = txl(*words)
    assert finished.returncode == 0, finished.stderr
    assert "resuming at step" in finished.stdout
