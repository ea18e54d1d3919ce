"""Without a GPU: all tensors of a step are on its device, and nothing in it waits for the GPU.

On torch's fake tensors (tests/support/fake_cuda.py), an operation whose result the host would read
raises, and so does one with tensors of two devices.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from data_pipeline.streams.segments import NO_LANE, Batch
from tests.support.fake_cuda import CUDA, backward, fake_cuda, to_fake_cuda
from tests.support.running_mean import KINDS
from tests.support.small_models import VOCAB_SIZE, small_model
from txl_dist.model import token_step
from txl_dist.model.choices import RECIPES
from txl_dist.model.memory.recurrent import RecurrentMemory
from txl_dist.model.token_step import TokenStep
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import Precision, autocast
from txl_dist.runtime.world import World
from txl_dist.training.batches import DeviceBatches
from txl_dist.training.step import TrainStep

ENCODINGS: dict[str, dict[str, Any]] = {
    "sinusoidal": {"same_length": True},
    "shaw": {"clamp_len": 4},
    "rotary": RECIPES["modern"] | {"untie_r": False},
    "alibi": {"pre_lnorm": True},
    "absolute": {"mem_len": 0},
}
SOFTMAXES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"cutoffs": (4, 9), "tie_weight": False},
    "adaptive, narrower": {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (False, True, True)},
}
DROPOUT = {"dropout": 0.1, "dropatt": 0.1}
FAST = [
    ("sinusoidal", "adaptive, narrower", DROPOUT),
    ("shaw", "adaptive", {}),
    ("rotary", "plain", {}),
    ("alibi", "plain", DROPOUT),
    ("absolute", "plain", {}),
]
ALL = [
    case
    for case in product(ENCODINGS, SOFTMAXES, ({}, DROPOUT, {"attention": "reference"}))
    if case not in FAST
]
every_model = pytest.mark.parametrize(
    ("encoding", "softmax", "options"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)],
    ids=str,
)
every_precision = pytest.mark.parametrize("precision", ["fp32", "bf16"])
LANES, TGT_LEN = 2, 3


def build(encoding: str, softmax: str, options: dict[str, Any], **more: Any) -> TransformerXL:
    settings = {"n_layer": 1, "distance_encoding": encoding}
    return small_model(**settings | ENCODINGS[encoding] | SOFTMAXES[softmax] | options | more)


class GpuWorld(World):
    """One rank, with a GPU."""

    @property
    def device(self) -> torch.device:
        return CUDA


class ModelAlone:
    """The engine's interface, as far as micro-batches call it, without DeepSpeed."""

    def __init__(self, model: TransformerXL, precision: Precision) -> None:
        self.model, self._precision = model, precision
        self.gradients: list[dict[Tensor, Tensor]] = []

    def forward(self, *inputs: Any) -> tuple[Tensor, RecurrentMemory]:
        with autocast(self._precision, CUDA):
            nats_BT, memory = self.model(*inputs)
        return nats_BT, memory

    def begin_micro_batch(self, *, is_last: bool) -> None:
        pass

    def backward(self, loss: Tensor) -> None:
        self.gradients.append(backward(loss))


def batches() -> list[Batch]:
    """Two batches of three lanes, of which the last row of the second micro-batch is padding."""
    generator = np.random.default_rng(0)
    shape = (2 * LANES, TGT_LEN)
    result = []
    for position in (0, TGT_LEN):
        token, target = generator.integers(0, VOCAB_SIZE, (2, *shape))
        target[0, 1] = target[-1] = -1
        age = np.full(shape, position, dtype=np.int32)
        result.append(
            Batch(
                token, target, age, position, position + TGT_LEN, [4, 7, 2, NO_LANE],
                num_targets=9, turn=0, next_turn=0,
            )
        )  # fmt: skip
    return result


@every_precision
@every_model
def test_a_step_until_its_only_synchronisation(
    encoding: str, softmax: str, options: dict[str, Any], precision: Precision
) -> None:
    """Two micro-batches of two segments: dropout, memory, all gradients, and the loss sums."""
    model, byte_counts_V = build(encoding, softmax, options).float(), np.ones(VOCAB_SIZE)
    with fake_cuda():
        to_fake_cuda(model)
        engine: Any = ModelAlone(model, precision)
        step = TrainStep(
            engine, GpuWorld(0, 1), lanes_in_turns=[[4, 7, 2]], micro_batch_rows=LANES,
            num_micro_batches=2, seed=3, byte_counts_V=byte_counts_V,
        )  # fmt: skip
        stream = DeviceBatches(iter(batches()), CUDA, is_ready=lambda: True)
        for number in (1, 2):
            computed = step.compute(next(stream), step=number, flags={"stop": False})
            stream.prefetch()
            step.memories = [[each.memory for each in computed.micro_batches]]
        values = computed.agreed
        assert values.device == CUDA
        assert values.shape == (6,)
    assert len(engine.gradients) == 4
    for gradients in engine.gradients:
        for parameter in model.parameters():
            gradient = gradients[parameter]
            assert (gradient.device, gradient.shape) == (CUDA, parameter.shape)
    assert {layer.device for memory in step.memories[0] for layer in memory.layers} == {CUDA}


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        ("modern", "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("modern", "fp32"), ("paper", "bf16"), ("paper", "fp32"))
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_memory(kind: str, recipe: str, precision: Precision) -> None:
    """Two segments of a step, twice; then inference."""
    model = small_model(memory=kind, **RECIPES[recipe]).float()
    with fake_cuda(), autocast(precision, CUDA):
        to_fake_cuda(model)
        input_BT = torch.zeros(LANES, 2 * TGT_LEN, dtype=torch.int64, device=CUDA)
        age_BT = torch.zeros_like(input_BT, dtype=torch.int32)
        target_BT = torch.zeros(input_BT.shape, dtype=torch.int64)
        memory = model.empty_memory(LANES)
        for _ in range(2):
            nats_BT, memory = model(input_BT, target_BT, age_BT, memory, None, 2)
            gradients = backward(nats_BT.sum())
        assert all(tensor.device == CUDA for tensor in memory.tensors().values())
        for name, parameter in model.named_parameters():
            gradient = gradients[parameter]
            assert (gradient.device, gradient.shape) == (CUDA, parameter.shape), name
        with torch.no_grad():
            hidden_BTD, _ = model.hidden(input_BT, age_BT, model.inference_state(LANES))
    assert (hidden_BTD.device, hidden_BTD.shape[:2]) == (CUDA, input_BT.shape)


@every_precision
@every_model
@torch.no_grad()
def test_evaluation_and_generation(
    encoding: str, softmax: str, options: dict[str, Any], precision: Precision
) -> None:
    """A prompt and one token with a KV cache, a lane less, and the logits of the next token."""
    model = build(encoding, softmax, options).float()
    with fake_cuda(), autocast(precision, CUDA):
        to_fake_cuda(model)
        cache = model.inference_state(LANES)
        first = batches()[0]
        input_BT, age_BT = (torch.from_numpy(x[:LANES]).to(CUDA) for x in (first.input, first.age))
        nats_BT, _ = model(input_BT, torch.from_numpy(first.target[:LANES]), age_BT, cache)
        cache.select([1], [2])
        hidden_BTD, _ = model.hidden(input_BT[:1, :1], age_BT[:1, :1], cache)
        logits_BTV = model.logits(hidden_BTD)
    assert (nats_BT.device, nats_BT.shape) == (CUDA, (LANES, TGT_LEN))
    assert (logits_BTV.device, logits_BTV.shape) == (CUDA, (1, 1, VOCAB_SIZE))


@every_precision
@pytest.mark.parametrize("encoding", ["sinusoidal", "shaw", "rotary", "alibi"])
@torch.no_grad()
def test_generation_of_a_token(
    encoding: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a memory that is not full, and with a full one. cuDNN is never allowed."""
    model = build(encoding, "adaptive", {}).float()
    is_cudnn_allowed = []

    def attend(query: Tensor, *inputs: Tensor, **options: Any) -> Tensor:
        is_cudnn_allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.nn.functional.scaled_dot_product_attention(query, *inputs, **options)

    monkeypatch.setattr(token_step, "scaled_dot_product_attention", attend)
    with fake_cuda(), autocast(precision, CUDA):
        to_fake_cuda(model)
        cache = model.inference_state(LANES)
        step = TokenStep(model, cache)
        token_B = torch.zeros(LANES, dtype=torch.int64, device=CUDA)
        for age in (0, cache.num_past):
            hidden_BD = step(token_B, [age, 1 + age])
            logits_BTV = model.logits(hidden_BD[:, None])
    assert (logits_BTV.device, logits_BTV.shape) == (CUDA, (LANES, 1, VOCAB_SIZE))
    assert is_cudnn_allowed == [False, False]


def test_autocast_is_on() -> None:
    with fake_cuda(), autocast("bf16", CUDA):
        x = torch.ones(2, 3, device=CUDA)
        assert (x @ x.T).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "offence",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: x + torch.ones(2, 3),
    ],
    ids=["nonzero", "boolean index", "item", "tolist", "if", "two devices"],
)
def test_an_offence_is_noticed(offence: Callable[[Tensor], object]) -> None:
    with fake_cuda():
        x = torch.zeros(2, 3, device=CUDA)
        with pytest.raises(
            (DataDependentOutputException, DynamicOutputShapeException, RuntimeError)
        ):
            offence(x)
