"""`optimizer.lr_factors` of 0: parts of the model that stay as they are."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.training_runs import (
    NO_EVALUATION,
    ZERO,
    TinyRuns,
    losses,
    norms,
    refusal,
    tiny_spec,
    train,
    weights_at,
)
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import load_model
from txl_dist.config.config_file import flatten_config
from txl_dist.config.training_config import OptimizerConfig
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.compatibility import check_config
from txl_dist.training.engine.optimizers import freeze, parameter_groups

NUM_STEPS = 6
SETTINGS = (
    NO_EVALUATION,
    f"training.num_steps={NUM_STEPS}",
    "training.checkpoint_interval_steps=3",
    "training.keep_checkpoints=9",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.weight_decay=0.1",
)
OPTIMIZERS = {
    "adamw": (),
    "averaged": ("optimizer.averaging=asgd",),
    "lamb": ("optimizer.name=lamb",),
    "muon": ("optimizer.name=muon", "optimizer.lr=0.02"),
}
FROZEN = {
    "hidden": "{hidden: 0}",
    "embedding": "{embedding: 0}",
    "all but hidden": "{embedding: 0, other: 0}",
}


def is_frozen(name: str, frozen: str) -> bool:
    """By the names of the parameters of configs/tiny.yaml, whose table is tied."""
    if name.startswith("table."):
        return frozen != "hidden"
    is_matrix = name.endswith(".weight") and "norm" not in name
    return is_matrix if frozen == "hidden" else not is_matrix and frozen == "all but hidden"


QUICK = [
    ("averaged", "all but hidden", 2, "2"),
    ("adamw", "embedding", 2, "3-all-spread"),
    ("lamb", "embedding", 1, "0"),
    ("muon", "embedding", 2, "1"),
]
OTHERS = [
    ("adamw", "hidden", 2, "0"),
    ("averaged", "hidden", 3, "3"),
    ("adamw", "hidden", 3, "1"),
    ("muon", "hidden", 1, "2"),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]


@pytest.mark.parametrize(("optimizer", "frozen", "num_ranks", "stage"), CASES)
def test_frozen_weights_stay_and_a_resume_is_bit_for_bit(
    tiny: TinyRuns, optimizer: str, frozen: str, num_ranks: int, stage: str
) -> None:
    settings = (
        *SETTINGS, *OPTIMIZERS[optimizer], *ZERO[stage],
        f"optimizer.lr_factors={FROZEN[frozen]}",
    )  # fmt: skip
    straight, stopped = tiny.path / "straight", tiny.path / "stopped"
    spec = tiny.spec(straight, *settings)
    assert tiny.ranks(num_ranks).run(train, spec) == [0] * num_ranks
    for num_steps in (3, NUM_STEPS):
        spec = tiny.spec(
            stopped, *settings, f"training.num_steps={num_steps}",
            allow_change=("training.num_steps",),
        )  # fmt: skip
        assert tiny.ranks(num_ranks).run(train, spec) == [0] * num_ranks

    config = load_model(CheckpointDirectory(straight).at(3))[0].config
    initial = dict(TransformerXL(config, seed=spec.config.seed).named_parameters())
    last = weights_at(straight, NUM_STEPS)
    for name, weight in last.items():
        assert torch.equal(weight, initial[name]) == is_frozen(name, frozen), name
    assert all(torch.equal(last[name], other) for name, other in weights_at(stopped, 6).items())
    assert losses(straight) == losses(stopped)
    assert norms(straight) == norms(stopped)
    if optimizer == "averaged":
        for name, average in weights_at(straight, NUM_STEPS, "averaged").items():
            assert torch.equal(average, initial[name]) == is_frozen(name, frozen), name


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_the_norm_is_that_of_the_trained_part(tiny: TinyRuns, stage: str) -> None:
    """The squares of the norms of two parts, each trained alone, add up to that of the whole."""
    first = []
    for factors in ("{}", "{hidden: 0}", "{embedding: 0, other: 0}"):
        tiny.trained(
            tiny.path / str(len(first)), *SETTINGS, *ZERO[stage],
            "training.num_steps=1", f"optimizer.lr_factors={factors}",
        )  # fmt: skip
        first.append(norms(tiny.path / str(len(first)))[0])
    assert first[0] == pytest.approx(math.hypot(*first[1:]), rel=1e-5)


def test_a_frozen_run_moves_between_ranks_and_stages(tiny: TinyRuns) -> None:
    settings = (*SETTINGS, "optimizer.averaging=asgd", "optimizer.lr_factors={hidden: 0}")
    reference, moved = tiny.path / "reference", tiny.path / "moved"
    tiny.trained(reference, *settings)
    for num_ranks, num_steps, stage in ((2, 2, "3-all-spread"), (1, 4, "1"), (2, 6, "0")):
        tiny.trained(
            moved, *settings, *ZERO[stage], f"training.num_steps={num_steps}",
            allow_change=("training.num_steps",), num_ranks=num_ranks,
        )  # fmt: skip
    assert losses(moved) == pytest.approx(losses(reference), rel=2e-6)


def states_of_a_run(world: World, spec: Any) -> dict[str, tuple[str, ...]]:
    """By parameter: the optimizer states that a checkpoint of this rank would have."""
    from contextlib import ExitStack

    from txl_dist.training.rank import build_step
    from txl_dist.training.spec import RunDirectory
    from txl_dist.training.start import Start

    directory = RunDirectory(spec.run_path)
    directory.create()
    with ExitStack() as stack:
        engine = build_step(Start.open(spec, world, directory, stack)).engine
        states = [state.values() for state in engine._optimizer.state.values()]
        held = sum(tensor.numel() for tensors in states for tensor in tensors)
        trained = {n: shape for n, shape in engine.shapes.items() if not is_frozen(n, "hidden")}
        assert held <= 1.1 * sum(2 * math.prod(shape) + 1 for shape in trained.values())
        assert {n for n, p in engine.model.named_parameters() if p.requires_grad} == trained.keys()
        return {each.name: tuple(each.states) for each in engine.fragments()}


@pytest.mark.parametrize("stage", ["0", "1", "3"])
def test_frozen_weights_have_no_optimizer_state(tiny: TinyRuns, stage: str) -> None:
    spec = tiny.spec(tiny.path, *SETTINGS, *ZERO[stage], "optimizer.lr_factors={hidden: 0}")
    (states,) = tiny.ranks(1).run(states_of_a_run, spec)
    for name, names in states.items():
        assert names == (() if is_frozen(name, "hidden") else ("exp_avg", "exp_avg_sq"))


@given(st.dictionaries(st.sampled_from(["hidden", "embedding", "head", "other"]), st.floats(0, 2)))
def test_a_parameter_is_in_a_group_unless_its_factor_is_zero(factors: dict[Any, float]) -> None:
    model = TransformerXL(
        ModelConfig(vocab_size=7, d_model=6, n_head=1, d_head=4, d_inner=5, tie_weight=False)
    )
    config = OptimizerConfig(lr_factors=factors)
    grouped = {id(p) for group in parameter_groups(model, config) for p in group["params"]}
    if not grouped:
        assert set(factors.values()) == {0}
        with pytest.raises(ConfigError, match="trains nothing"):
            freeze(model, config)
        return
    freeze(model, config)
    assert {id(p) for p in model.parameters() if p.requires_grad} == grouped
    for start, role in (("table.", "embedding"), ("softmax.weights.", "head")):
        (trained,) = {p.requires_grad for n, p in model.named_parameters() if n.startswith(start)}
        assert trained == (factors.get(role, 1) != 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [("head: 0", ""), ("", "head: 0"), ("head: 0", "head: 2"), ("head: 3", "head: 0")],
)
def test_what_is_frozen_cannot_change_in_a_run(before: str, after: str) -> None:
    old, new = (
        flatten_config(
            tiny_spec(Path("data"), Path("run"), f"optimizer.lr_factors={{{factors}}}").config
        )
        for factors in (before, after)
    )
    message = r"lr_factors\.head: .* cannot change .* init_from=run/checkpoints/step-00000003"
    with pytest.raises(CheckpointError, match=message):
        check_config(
            old, new, allowed=("optimizer.lr_factors.head",),
            checkpoint="run/checkpoints/step-00000003",
        )  # fmt: skip


def test_a_run_that_would_train_nothing_is_refused(tiny: TinyRuns) -> None:
    factors = "optimizer.lr_factors={hidden: 0, embedding: 0, other: 0}"
    assert tiny.ranks(2).run(train, tiny.spec(tiny.path, *SETTINGS, factors)) == [2, 2]
    assert "trains nothing" in refusal(tiny.path)
    assert not CheckpointDirectory(tiny.path).steps()
