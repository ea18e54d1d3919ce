"""Checkpoints: sizes of the real writer, and intervals and goodput against brute force."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.txl_dist.checkpoint import saving
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import MANIFEST_NAME
from txl_dist.checkpoint.snapshot import Fragment, Snapshot
from txl_dist.checkpoint.writer import Save
from txl_dist.estimate.checkpoint import best_interval_seconds, checkpoint_size, goodput
from txl_dist.estimate.memory import ActivationPeaks, ModelNeeds, Parameter

HOUR = 3600.0
NO_ACTIVATIONS = ActivationPeaks(
    after_forward=0, before_gradients=0, with_gradients=0, without_gradients=0, after_first_bucket=0
)


def test_sizes_are_those_of_the_writer_and_grow_with_the_ranks_as_its_manifest(
    tmp_path: Path,
) -> None:
    model, num_lanes = saving.model(step=1), 40
    parameters = tuple(
        Parameter(name=name, num_elements=p.numel(), num_states=len(saving.STATES))
        for name, p in model.named_parameters()
    )
    estimated, written = [], []
    for num_ranks in (1, 2, 40):
        run = tmp_path / str(num_ranks)
        checkpoint = save_sliced(run, model, num_ranks=num_ranks, num_lanes=num_lanes)
        size = checkpoint_size(
            ModelNeeds(parameters=parameters, activations=NO_ACTIVATIONS),
            zero_stage=0,  # every parameter is cut into a slice for every rank
            num_ranks=num_ranks,
            num_lanes=num_lanes,
            memory_elements_per_lane=saving.memory(1, 0).numel(),
        )
        tensors = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        headers = 100 * (size.num_slices * 3 + num_lanes + 3 * num_ranks)
        assert size.num_bytes <= tensors <= size.num_bytes + headers
        assert size.num_files == len(list(checkpoint.iterdir()))
        estimated.append(size.manifest_bytes)
        written.append((checkpoint / MANIFEST_NAME).stat().st_size)
    for number in (1, 2):
        growth = written[number] - written[0]
        assert estimated[number] - estimated[0] == pytest.approx(growth, rel=0.1)


def save_sliced(run: Path, model: torch.nn.Module, *, num_ranks: int, num_lanes: int) -> Path:
    """A checkpoint in which every rank has written its slice of every parameter."""
    directory = CheckpointDirectory(run)
    directory.open()
    for rank in reversed(range(num_ranks)):
        fragments = []
        for name, parameter in model.named_parameters():
            size = parameter.numel()
            start, stop = rank * size // num_ranks, (rank + 1) * size // num_ranks
            if start < stop:
                part = parameter.detach().reshape(-1)[start:stop]
                states = dict.fromkeys(saving.STATES, part)
                fragments.append(Fragment(name, tuple(parameter.shape), start, part, states))
        lanes = range(rank * num_lanes // num_ranks, (rank + 1) * num_lanes // num_ranks)
        one_rank = Save(
            directory=directory, save_id="a" * 8, state={"step": 1}, rank=rank, num_ranks=num_ranks
        )
        one_rank.write_part(Snapshot(fragments, [(lane, saving.memory(1, lane)) for lane in lanes]))
    header = replace(saving.HEADER, num_lanes=num_lanes)
    return one_rank.publish(header, mlflow_run_id=None, timeout_seconds=10)


@given(save=st.floats(0.01, 600), mtbf_hours=st.floats(0.5, 5000), restart=st.floats(0.0, 1000.0))
def test_no_interval_is_much_better_than_the_best(
    save: float, mtbf_hours: float, restart: float
) -> None:
    failures = {
        "save_seconds": save, "mtbf_seconds": mtbf_hours * HOUR, "restart_seconds": restart
    }  # fmt: skip
    best = best_interval_seconds(save_seconds=save, mtbf_seconds=mtbf_hours * HOUR)
    at_best = goodput(interval_seconds=best, **failures)
    others = [goodput(interval_seconds=best * 1.1**power, **failures) for power in range(-60, 60)]
    assert max(others) <= at_best * 1.002


def test_goodput_is_that_of_a_simulated_run() -> None:
    interval, save, restart, mtbf = 600.0, 30.0, 120.0, 3 * HOUR
    chance, done, wall = random.Random(0), 0.0, 0.0
    while done < 3000 * HOUR:
        until_failure = chance.expovariate(1 / mtbf)
        if until_failure >= interval + save:
            done, wall = done + interval, wall + interval + save
            continue
        wall += until_failure
        # A failure during the restart starts it again.
        while (until_failure := chance.expovariate(1 / mtbf)) < restart:
            wall += until_failure
        wall += restart
    expected = goodput(
        interval_seconds=interval, save_seconds=save, restart_seconds=restart, mtbf_seconds=mtbf
    )
    assert expected == pytest.approx(done / wall, rel=0.01)
