"""Dropout: masks are a function of integers only.

Those by lane of (seed, step, lane, layer, place), from numpy and, in Triton's interpreter, from
Triton's kernels. Those of a model without masks of (seed, segment, layer, place).
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.testing import assert_close

from tests.support.keep_bits import unpack
from tests.support.small_models import random_text, read_stream, small_model
from txl_dist.model.dropout import (
    DeviceDropoutMasks,
    Dropout,
    GpuLaneDropoutMasks,
    LaneDropoutMasks,
    Place,
    keep_factor,
)
from txl_dist.model.transformer_xl import TransformerXL

PLACES = get_args(Place)
BASE: dict[str, Any] = {"seed": 3, "step": 5, "lane": 7, "layer": 1, "place": "inner"}


def mask_of(*, seed: int, step: int, lane: int, layer: int, place: Place) -> Tensor:
    masks = LaneDropoutMasks(seed=seed, step=step, lanes=[lane])
    return masks.scale(torch.ones(1, 9, 11), Dropout(0.3, layer=layer, place=place))


@settings(max_examples=40, deadline=None)
@given(lanes=st.permutations(range(7)), cut=st.integers(1, 6))
def test_a_lanes_mask_is_the_same_in_any_row_of_any_micro_batch(lanes: list[int], cut: int) -> None:
    for micro_batch in (lanes[:cut], lanes[cut:]):
        masks = LaneDropoutMasks(seed=3, step=5, lanes=micro_batch)
        x = torch.ones(len(micro_batch), 9, 11)
        mask = masks.scale(x, Dropout(0.3, layer=1, place="inner"))
        for row, lane in enumerate(micro_batch):
            assert torch.equal(mask[row : row + 1], mask_of(**BASE | {"lane": lane}))


@pytest.mark.parametrize("mem_len", [0, 5])
def test_a_model_gives_each_lane_the_same_nats_in_any_micro_batch(mem_len: int) -> None:
    model, text_BN = small_model(dropout=0.3, dropatt=0.2, mem_len=mem_len), random_text(4, 7)

    def nats(lanes: list[int]) -> Tensor:
        masks = LaneDropoutMasks(seed=3, step=5, lanes=lanes)
        return read_stream(model, text_BN[lanes], tgt_len=6, masks=masks)[0]

    whole = nats([0, 1, 2, 3])
    assert_close(torch.cat([nats([0, 1, 2]), nats([3])]), whole)
    assert_close(nats([2, 0, 3, 1]), whole[[2, 0, 3, 1]])
    assert (whole - nats_of(model.eval(), text_BN)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["lane", "device"])
def test_every_segment_of_a_step_has_other_masks(kind: str) -> None:
    """They are those of steps of one segment each; all segments have the same text."""
    model, text_BT = small_model(dropout=0.3, dropatt=0.2, mem_len=0), random_text(2, 3)
    age_BT = torch.arange(3).expand(2, 3)
    masks, of_segment = {
        "lane": (
            LaneDropoutMasks(seed=3, step=5, lanes=[4, 7]),
            lambda number: LaneDropoutMasks(seed=3, step=5 * 3 + number, lanes=[4, 7]),
        ),
        "device": (
            DeviceDropoutMasks(seed=3),
            lambda number: DeviceDropoutMasks(seed=3, segment=number),
        ),
    }[kind]
    three = [x.repeat(1, 3) for x in (text_BT, text_BT, age_BT)]
    nats_BT, _ = model(*three, model.empty_memory(2), masks, num_segments=3)
    for number, part_BT in enumerate(nats_BT.chunk(3, dim=1)):
        inputs = text_BT, text_BT, age_BT, model.empty_memory(2)
        assert_close(part_BT, model(*inputs, of_segment(number))[0])
    assert not any(torch.equal(part_BT, nats_BT[:, :3]) for part_BT in nats_BT[:, 3:].chunk(2, 1))


def nats_of(model: TransformerXL, text_BN: Tensor) -> Tensor:
    """Of one segment, in the model's mode, without masks."""
    return read_stream(model, text_BN, tgt_len=text_BN.shape[1])[0]


@pytest.mark.parametrize("option", ["dropout", "dropatt"])
@pytest.mark.parametrize("attention", ["reference", "cpu", "sdpa"])
def test_a_loop_without_masks_has_the_dropout_of_any_module(option: str, attention: str) -> None:
    """Random in training mode, as `torch.manual_seed` says, and none in evaluation mode."""
    model, text_BN = small_model(**{option: 0.2}, attention=attention), random_text(3, 7)
    assert model.training, "as a module of torch is when it is created"
    torch.manual_seed(4)
    first, second = nats_of(model, text_BN), nats_of(model, text_BN)
    torch.manual_seed(4)
    assert torch.equal(nats_of(model, text_BN), first)
    plain = nats_of(model.eval(), text_BN)
    assert torch.equal(plain, nats_of(model, text_BN))
    for one, other in ((first, second), (first, plain), (second, plain)):
        assert (one - other).abs().max() > 1e-3
    assert_close(plain, nats_of(small_model(attention=attention), text_BN))


def test_a_segment_with_a_kv_cache_has_no_dropout() -> None:
    model, text_BN = small_model(dropout=0.5, dropatt=0.5), random_text(3, 7)
    with torch.no_grad():
        cached_BT, _ = read_stream(model, text_BN, tgt_len=6, memory=model.inference_state(3))
        assert_close(cached_BT, nats_of(model.eval(), text_BN))


@pytest.mark.parametrize(
    "other",
    [
        *({name: value} for name in ("seed", "step", "lane", "layer") for value in (2, 2**31)),
        *({"place": place} for place in PLACES if place != "inner"),
        {"lane": -1},
        {"seed": BASE["step"], "step": BASE["seed"]},
        {"lane": BASE["layer"], "layer": BASE["lane"]},
    ],
    ids=str,
)
def test_another_seed_step_lane_layer_or_place_gives_another_mask(other: dict) -> None:
    assert not torch.equal(mask_of(**BASE), mask_of(**BASE | other))
    assert torch.equal(mask_of(**BASE), mask_of(**BASE)), "the same arguments give the same mask"


def test_the_dropouts_of_a_model_have_different_masks() -> None:
    modules = [m for m in small_model(n_layer=3).modules() if isinstance(m, Dropout)]
    assert len({(m.layer, m.place) for m in modules}) == len(modules) == 3 + 3 * 4
    assert {m.place for m in modules} == set(PLACES)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.05, 0.1, 0.5, 0.9])
def test_the_rate_and_the_mean_are_as_configured(rate: float) -> None:
    masks = LaneDropoutMasks(seed=3, step=5, lanes=[0, 1])
    scale = masks.scale(torch.ones(2, 300, 400).double(), Dropout(rate, layer=0, place="output"))
    five_sigmas = 5 * (rate * (1 - rate) / scale.numel()) ** 0.5
    assert abs((scale == 0).double().mean() - rate) < five_sigmas
    assert abs(scale.mean() - 1) < five_sigmas / (1 - rate)
    assert_close(scale[scale > 0].unique().item(), 1 / (1 - rate), rtol=1e-4, atol=0)


def test_the_masks_are_those_of_every_earlier_version() -> None:
    """A resumed run must continue with the same masks, so these bits may never change."""
    is_kept = (mask_of(**BASE) > 0).flatten()[:24].int().tolist()
    assert "".join(map(str, is_kept)) == "100011111011111011111101"


DEVICE_BASE: dict[str, Any] = {
    "seed": 3, "segment": 2, "layer": 1, "place": "inner",
}  # fmt: skip


def device_mask_of(*, layer: int, place: Any, **key: int) -> torch.Tensor:
    masks, x = DeviceDropoutMasks(**key), torch.ones(20, 50)
    return masks.scale(x, Dropout(0.25, layer=layer, place=place))


@pytest.mark.parametrize("name", DEVICE_BASE)
def test_only_the_same_place_has_the_same_mask(name: str) -> None:
    other = "embedding" if name == "place" else DEVICE_BASE[name] + 1
    assert torch.equal(device_mask_of(**DEVICE_BASE), device_mask_of(**DEVICE_BASE))
    assert not torch.equal(
        device_mask_of(**DEVICE_BASE), device_mask_of(**DEVICE_BASE | {name: other})
    )


@pytest.mark.parametrize("as_bits", [False, True])
def test_the_rate_and_the_scale(as_bits: bool) -> None:
    masks, x = DeviceDropoutMasks(seed=3, segment=2), torch.ones(3, 7, 101)
    dropout = Dropout(0.25, layer=1, place="inner")
    mask = masks.scale(x, dropout)
    if as_bits:
        bits = masks.keep_bits(x, dropout)
        assert (bits.words.shape, bits.words.dtype) == ((3, 7, 7), torch.int16)
        mask = unpack(bits, x.shape)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.2 < (mask == 0).double().mean() < 0.3
    for position in range(16):  # of a word
        assert 0.1 < (mask[..., position::16] == 0).double().mean() < 0.4


def test_the_random_state_of_torch_does_not_change() -> None:
    before = torch.random.get_rng_state()
    device_mask_of(**DEVICE_BASE)
    assert torch.equal(torch.random.get_rng_state(), before)


LANES = (0, 5, 2**31, -1)
"""Of which -1 is padding."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[None]:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the compiled kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is decorated
        import_module("txl_dist.model.kernels")
        yield


@pytest.mark.parametrize(
    ("seed", "step", "layer", "place", "rate", "shape", "dtype"),
    [
        (0, 1, 0, "embedding", 0.1, (4, 3, 7), torch.float32),
        (2**63 - 1, 2**40 + 3, 17, "attention weights", 0.25, (4, 2, 3, 5), torch.bfloat16),
        (7, 16, 1, "inner", 0.99, (4, 2100), torch.float64),
    ],
)
def test_every_element_equals_that_of_the_cpu(
    kernel: None, seed: int, step: int, layer: int, place: Place, rate: float,
    shape: tuple[int, ...], dtype: torch.dtype,
) -> None:  # fmt: skip
    masks = LaneDropoutMasks(seed=seed, step=step, lanes=LANES)
    dropout = Dropout(rate, layer=layer, place=place)
    x = torch.empty(shape, dtype=dtype)
    expected = masks.scale(x, dropout)
    on_gpu = GpuLaneDropoutMasks.of(masks, torch.device("cpu"))
    assert torch.equal(on_gpu.scale(x, dropout), expected)
    assert 0 < (expected == 0).double().mean() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_relu_and_dropout_in_one_are_those_of_the_cpu(kernel: None, dtype: torch.dtype) -> None:
    """Values and gradients, also of 0 and NaN."""
    masks = LaneDropoutMasks(seed=3, step=5, lanes=LANES)
    on_gpu = GpuLaneDropoutMasks.of(masks, torch.device("cpu"))
    scale = masks.scale(torch.empty(4, 3, 23, dtype=dtype), Dropout(0.3, layer=2, place="inner"))
    values = torch.randn(4, 3, 23, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[1, 2, :9], values[2, 1, :9] = 0, torch.nan
    d_output = torch.randn(4, 3, 23, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for in_one in (False, True):
        x = values.clone().requires_grad_()
        if in_one:
            output = Dropout(0.3, layer=2, place="inner").of_relu(x, on_gpu)
            assert output is not None
        else:
            output = torch.where(scale == 0, 0, x.relu() * scale)
        output.backward(d_output)
        assert x.grad is not None
        results.append((output.detach(), x.grad))
    expected, actual = results
    # Triton's interpreter does not round to the nearest.
    rtol = 2**-7 if dtype == torch.bfloat16 else 0
    assert_close(actual[0], expected[0], rtol=rtol, atol=0, equal_nan=True)
    assert_close(actual[1], expected[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3, 0.5, 0.99])
def test_the_factor_is_rounded_as_torch_rounds_numbers(dtype: torch.dtype, rate: float) -> None:
    threshold = round(rate * 65536)
    expected = torch.ones((), dtype=dtype) * (65536 / (65536 - threshold))
    assert keep_factor(threshold, dtype) == float(expected)


@pytest.mark.parametrize("shape", [(4, 2, 3, 5), (4, 7, 19), (4, 3, 700), (4, 2, 3, 16), (4, 2048)])
def test_bits_are_those_of_the_mask(kernel: None, shape: tuple[int, ...]) -> None:
    """On the CPU and by the kernel."""
    masks, x = LaneDropoutMasks(seed=2**63 - 1, step=2**40 + 3, lanes=LANES), torch.empty(shape)
    place: Place = "attention weights"
    on_cpu = masks.keep_bits(x, Dropout(0.25, layer=17, place=place))
    expected = masks.scale(x, Dropout(0.25, layer=17, place=place))
    assert torch.equal(unpack(on_cpu, shape), expected)
    on_gpu = GpuLaneDropoutMasks.of(masks, torch.device("cpu"))
    bits = on_gpu.keep_bits(x, Dropout(0.25, layer=17, place=place))
    assert (bits.words.dtype, bits.words.shape) == (on_cpu.words.dtype, on_cpu.words.shape)
    assert bits.factor == on_cpu.factor
    assert torch.equal(unpack(bits, shape), expected)


def test_a_mask_for_all_lanes_does_not_depend_on_them(kernel: None) -> None:
    x, dropout = torch.empty(9, 6), Dropout(0.5, layer=0, place="distances", by_lane=False)
    masks = [LaneDropoutMasks(seed=3, step=5, lanes=lanes) for lanes in ([0], LANES)]
    on_gpu = GpuLaneDropoutMasks.of(masks[1], torch.device("cpu"))
    expected, *others = (each.scale(x, dropout) for each in (*masks, on_gpu))
    assert all(torch.equal(other, expected) for other in others)


def test_an_empty_tensor_needs_no_kernel(kernel: None) -> None:
    masks = GpuLaneDropoutMasks.of(
        LaneDropoutMasks(seed=3, step=5, lanes=[1, 2]), torch.device("cpu")
    )
    x = torch.empty(2, 0, 4)
    assert masks.scale(x, Dropout(0.1, layer=0, place="inner")).shape == (2, 0, 4)


def test_compiled_layers_store_the_bits_of_a_mask(kernel: None) -> None:
    """For backward, of the masks of attention and feed-forward, and compute what others do."""
    masks = GpuLaneDropoutMasks.of(
        LaneDropoutMasks(seed=3, step=5, lanes=[0, 7]), torch.device("cpu")
    )
    stored: list[torch.fx.Node] = []

    def forward_code(code: torch.fx.GraphModule, inputs: Any) -> Any:
        stored.extend(code.graph.output_node().args[0])  # type: ignore[arg-type]
        return code

    results = []
    for compiles in (False, True):
        model = small_model(d_model=50, n_layer=1, dropout=0.3, attention="reference")
        if compiles:
            backend = aot_autograd(
                fw_compiler=make_boxed_compiler(forward_code),
                bw_compiler=make_boxed_compiler(lambda code, _: code),
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
            )
            model.compute_layer = torch.compile(model.compute_layer, backend=backend)
        text = random_text(2, 3)
        age_BT = torch.arange(3).expand(2, -1)
        nats_BT, _ = model(text, text, age_BT, model.empty_memory(2), masks)
        nats_BT.sum().backward()
        results.append([nats_BT, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert_close(*results, rtol=1e-12, atol=1e-12)
    shapes = [
        (str(node.target).split(".")[1], tuple(node.meta["val"].shape))
        for node in stored
        if node is not None and "lane_dropout" in str(node.target)
    ]
    bits = "lane_dropout_bits", (2, 3, 4)  # four words have 64 bits
    assert sorted(shapes) == [bits, bits, ("lane_dropout_relu", (2, 3, 7))]
