"""`training.compile`: compiled once, before the first step; the same trajectory to rounding."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.testing import assert_close

from tests.support.small_models import small_model
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    TINY,
    ZERO,
    TinyRuns,
    losses,
    metrics,
    tiny_spec,
    train,
)
from txl_dist.config.config_file import load_run_config
from txl_dist.config.run_config import Precision
from txl_dist.errors import ConfigError
from txl_dist.model.dropout import LaneDropoutMasks
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import autocast
from txl_dist.runtime.world import World
from txl_dist.training import compilation, loop
from txl_dist.training.spec import TrainSpec

COMPILE = "training.compile=true"
# A compiled layer sums in another order. Measured over these steps: 2.4e-8, and 1.3e-7 in the norm.
TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-5


def test_stage_3_is_refused_with_the_reason(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compile is not supported at deepspeed\.zero_stage=3"):
        tiny_spec(dataset, tmp_path, COMPILE, *ZERO["3"])


@pytest.mark.parametrize(
    ("settings", "device", "is_recorded"),
    [
        ((COMPILE,), "cuda", True),
        ((COMPILE,), "cpu", False),
        (("training.compile=without_graphs",), "cuda", False),
        (("training.compile=false",), "cuda", False),
        ((COMPILE, "training.activation_checkpointing=true"), "cuda", False),
        ((COMPILE, "training.backprop_segments=3"), "cuda", False),
    ],
    ids=str,
)
def test_compiled_layers_are_recorded_where_that_is_possible(
    settings: tuple[str, ...], device: str, is_recorded: bool
) -> None:
    config = load_run_config(
        TINY, ["data.path=none", "directory=none", "data.tgt_len=3", *settings]
    )
    assert bool(config.training.compile) == (settings[0] != "training.compile=false")
    assert compilation.records_graphs(config, torch.device(device)) == is_recorded


def train_and_count_graphs(world: World, spec: TrainSpec) -> tuple[int, int]:
    """Compiled graphs when the first step begins, and at the end."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()  # this process may have compiled for another test
    counters.clear()
    at_start: list[int] = []
    run = loop.Trainer.run

    def counted(trainer: loop.Trainer) -> object:
        at_start.append(counters["stats"]["unique_graphs"])
        return run(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "run", counted)
        assert train(world, spec) == 0
    return at_start[0], counters["stats"]["unique_graphs"]


NINE_LAYERS = "model.n_layer=9"
"""More than torch compiles variants of one function."""


BF16 = ("precision=bf16", "training.memory_dtype=bf16")
BF16_TOLERANCE, BF16_NORM_TOLERANCE = 1e-3, 1e-2
"""Compiled code keeps in fp32 what single operations round to bf16, which has 8 bits: losses
differed by 7.5e-5."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (NINE_LAYERS, *DROPOUT),
        (NINE_LAYERS, "model.attention=triton", "training.num_steps=5"),
        BF16,
        ("optimizer.lr_factors={hidden: 0}",),
    ],
    ids=str,
)
def test_compiled_layers_have_the_same_trajectory_and_are_compiled_before_the_first_step(
    tiny: TinyRuns, options: tuple[str, ...]
) -> None:
    settings = (NO_EVALUATION, "training.num_steps=12", *options)
    eager, compiled = tiny.path / "eager", tiny.path / "compiled"
    tiny.trained(eager, *settings, num_ranks=1)
    spec = tiny.spec(compiled, *settings, COMPILE)
    [(at_start, at_end)] = tiny.ranks(1).run(train_and_count_graphs, spec)
    assert 0 < at_start == at_end < 9
    is_bf16 = options is BF16
    tolerance = BF16_TOLERANCE if is_bf16 else TOLERANCE
    assert losses(compiled) == pytest.approx(losses(eager), rel=tolerance)
    eager_norms, norms = (
        [line["gradient_norm"] for line in metrics(run)] for run in (eager, compiled)
    )
    tolerance = BF16_NORM_TOLERANCE if is_bf16 else NORM_TOLERANCE
    assert norms == pytest.approx(eager_norms, rel=tolerance)


@pytest.mark.parametrize(("d_inner", "is_aligned"), [(16, True), (7, False)])
def test_the_compiler_sees_no_alignment_that_training_does_not_have(
    d_inner: int, is_aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed moves the parameters to slices of one tensor."""
    sizes = {"vocab_size": 12, "d_model": 8, "d_inner": d_inner}
    model, offsets = small_model(**sizes, attention="reference").float(), set()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def record(module: Any, inputs: list[Any]) -> Any:
        offsets.update(x.storage_offset() % 4 for x in inputs if isinstance(x, nn.Parameter))
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    config = load_run_config(TINY, ["data.path=none", "directory=none", "data.tgt_len=3"])
    compilation.compile_layers(model, config, World(0, 1), lanes=range(2))
    assert offsets == ({0} if is_aligned else {1})
    assert all(p.storage_offset() == 0 and p.grad is None for p in model.parameters())
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def forward(model: TransformerXL, tgt_len: int) -> None:
    token_BT = torch.zeros(2, tgt_len, dtype=torch.int64)
    masks = LaneDropoutMasks(seed=0, step=1, lanes=range(2))
    model(token_BT, token_BT, token_BT.int(), model.empty_memory(2), masks)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_compiled_before_the_first_step_is_what_cuda_graphs_record(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code is for one state of autocast, its cache included."""
    compiled = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=lambda module, _: (
        compiled.append(module) or module.forward
    )))  # fmt: skip
    settings = ["data.path=none", "directory=none", "data.tgt_len=3", f"precision={precision}"]
    config = load_run_config(TINY, [*settings, COMPILE])
    monkeypatch.setattr(compilation, "records_graphs", lambda *_: True)
    model = small_model(attention="reference").float()
    compilation.compile_layers(model, config, World(0, 1), lanes=range(2))
    before = len(compiled)
    with autocast(precision, torch.device("cpu"), cache_enabled=False):
        forward(model, 3)
    assert len(compiled) == before > 0


def test_layers_that_torch_would_not_compile_any_more_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not a line in the log. The variants of models that were built before do not count."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        for _ in range(3):
            model = small_model(attention="reference")
            compilation.compile_model(model, torch.device("cpu"))
            forward(model, 3)
            forward(model, 4)
        with pytest.raises(FailOnRecompileLimitHit):
            forward(model, 5)
