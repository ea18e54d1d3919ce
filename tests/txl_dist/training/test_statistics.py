"""Statistics by layer are those of the stored weights, at every stage and number of ranks."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import DROPOUT, NO_EVALUATION, ZERO, metrics, tiny_job, train
from txl_dist.convert.stored_model import find_model
from txl_dist.training.diagnostics import group_of

SETTINGS = (NO_EVALUATION, *DROPOUT, "optimizer.warmup_steps=2", "training.num_steps=4",
    "training.statistics_interval_steps=2")  # fmt: skip
GROUPS = ["content_bias_HK", "distance_bias_HK", "layer_0", "layer_1", "softmax", "table"]


def statistics(run: Path) -> dict[int, dict[str, float]]:
    """By step, then by name."""
    return {
        line["step"]: {name: line[name] for name in line if name.startswith("weights/")}
        for line in metrics(run)
        if "weights/table/norm" in line
    }


@pytest.fixture(scope="module")
def run(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("statistics")
    often = ("training.checkpoint_interval_steps=1", "training.keep_checkpoints=9")
    assert ranks(1).run(train, tiny_job(dataset, run, *SETTINGS, *often, *ZERO["0"])) == [0]
    return run


def weights(run: Path, step: int) -> dict[str, Tensor]:
    """All weights of a group in one tensor, from a checkpoint."""
    path = run / "checkpoints" / f"step-{step:08}"
    model, _ = find_model(path).load_with_tokenizer()
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault(group_of(name), []).append(parameter.detach().double().flatten())
    return {group: torch.cat(tensors) for group, tensors in parts.items()}


def test_norms_are_those_of_the_stored_weights(run: Path) -> None:
    assert sorted(statistics(run)) == [2, 4]
    for step, values in statistics(run).items():
        before, after = weights(run, step - 1), weights(run, step)
        assert sorted(after) == GROUPS
        for group in GROUPS:
            norm, ratio = after[group].norm(), (after[group] - before[group]).norm()
            assert values[f"weights/{group}/norm"] == pytest.approx(norm.item(), rel=1e-6)
            expected = (ratio / before[group].norm()).item()
            assert values[f"weights/{group}/update_ratio"] == pytest.approx(expected, rel=1e-4)


def test_gradient_norms_of_all_groups_are_the_global_norm(run: Path) -> None:
    for step, values in statistics(run).items():
        total = math.hypot(*(values[f"weights/{group}/gradient_norm"] for group in GROUPS))
        [line] = [line for line in metrics(run) if line["step"] == step and "loss" in line]
        assert total == pytest.approx(line["gradient_norm"], rel=1e-6)


CASES = [(2, stage, "none") for stage in ZERO] + [(2, "1", "optimizer"), (2, "3", "parameters")]


@pytest.mark.parametrize(
    ("num_ranks", "stage", "offload"),
    [
        pytest.param(*case, marks=[] if case[1:] == ("3-all-spread", "none") else pytest.mark.slow)
        for case in CASES
    ],
)
def test_they_do_not_depend_on_ranks_or_stage(
    ranks: RankGroups, dataset: Path, run: Path, tmp_path: Path,
    num_ranks: int, stage: str, offload: str,
) -> None:  # fmt: skip
    settings = (*SETTINGS, *ZERO[stage], f"deepspeed.offload={offload}")
    micro = "training.micro_batch_lanes=2"
    job = tiny_job(dataset, tmp_path, *settings, micro)
    assert ranks(num_ranks).run(train, job) == [0] * num_ranks
    expected = statistics(run)
    assert sorted(statistics(tmp_path)) == sorted(expected)
    for step, values in statistics(tmp_path).items():
        assert values == pytest.approx(expected[step], rel=1e-5)
