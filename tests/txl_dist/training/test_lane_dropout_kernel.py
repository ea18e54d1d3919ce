"""The Triton kernels of dropout masks, in Triton's interpreter on a CPU, give numpy's bits."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.support.keep_bits import unpack
from txl_dist.model.dropout import Place
from txl_dist.training.lane_dropout import LaneDropoutMasks

PLACES = get_args(Place)
LANES = (0, 5, 2**31, -1)
"""Of which -1 is padding."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the compiled kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is decorated
        yield import_module("txl_dist.training.lane_dropout_kernel")


def by_kernel(
    kernel: ModuleType, masks: LaneDropoutMasks, x: Tensor, rate: float, layer: int, place: Place
) -> Tensor:
    lane_B = masks._lanes_on(torch.device("cpu"))[:-1]
    counter = [*masks.key, layer, PLACES.index(place)]
    threshold = round(rate * 2**16)
    return kernel.lane_dropout_scale(lane_B, counter, threshold, list(x.shape), x.dtype)


@pytest.mark.parametrize(
    ("seed", "step", "layer", "place", "rate", "shape", "dtype"),
    [
        (0, 1, 0, "embedding", 0.1, (4, 3, 7), torch.float32),
        (2**63 - 1, 2**40 + 3, 17, "attention weights", 0.25, (4, 2, 3, 5), torch.bfloat16),
        (7, 16, 1, "inner", 0.99, (4, 2100), torch.float64),
    ],
)
def test_every_element_equals_that_of_the_cpu(
    kernel: ModuleType, seed: int, step: int, layer: int, place: Place, rate: float,
    shape: tuple[int, ...], dtype: torch.dtype,
) -> None:  # fmt: skip
    masks = LaneDropoutMasks(seed=seed, step=step, lanes=LANES)
    x = torch.empty(shape, dtype=dtype)
    expected = masks.scale(x, rate=rate, layer=layer, place=place, by_lane=True)
    assert torch.equal(by_kernel(kernel, masks, x, rate, layer, place), expected)
    assert 0 < (expected == 0).double().mean() < 1


@pytest.mark.parametrize("shape", [(4, 2, 3, 5), (4, 7, 19), (4, 3, 700), (4, 2, 3, 16), (4, 2048)])
def test_bits_are_those_of_the_mask(kernel: ModuleType, shape: tuple[int, ...]) -> None:
    """On the CPU and by the kernel."""
    masks, x = LaneDropoutMasks(seed=2**63 - 1, step=2**40 + 3, lanes=LANES), torch.empty(shape)
    place: Place = "attention weights"
    on_cpu = masks.keep_bits(x, rate=0.25, layer=17, place=place)
    expected = masks.scale(x, rate=0.25, layer=17, place=place, by_lane=True)
    assert torch.equal(unpack(on_cpu, shape), expected)
    lane_B = masks._lanes_on(torch.device("cpu"))[:-1]
    counter = [*masks.key, 17, PLACES.index(place)]
    words = kernel.lane_dropout_bits(lane_B, counter, 2**14, list(shape))
    assert (words.dtype, words.shape) == (on_cpu.words.dtype, on_cpu.words.shape)
    assert torch.equal(unpack(on_cpu._replace(words=words), shape), expected)


def test_a_mask_that_lanes_share_has_the_last_lane_number(kernel: ModuleType) -> None:
    masks, x = LaneDropoutMasks(seed=3, step=5, lanes=LANES), torch.empty(9, 6)
    expected = masks.scale(x, rate=0.5, layer=0, place="distances", by_lane=False)
    lane_1 = masks._lanes_on(torch.device("cpu"))[-1:]
    counter = [3, 5, 0, PLACES.index("distances")]
    scale = kernel.lane_dropout_scale(lane_1, counter, 2**15, [9, 6], torch.float32)
    assert torch.equal(scale, expected)


def test_an_empty_tensor_needs_no_kernel(kernel: ModuleType) -> None:
    assert kernel.lane_dropout_scale(
        torch.tensor([1, 2]), [3, 5, 0, 1], 9, [2, 0, 4], torch.float32
    ).shape == (2, 0, 4)
