"""`training.dropout_rng: device`: masks repeat, and differ by all that they may depend on."""

from typing import Any

import pytest
import torch

from tests.support.keep_bits import unpack
from txl_dist.model.device_dropout import DeviceDropoutMasks

BASE: dict[str, Any] = {
    "seed": 3, "step": 5, "rank": 1, "micro_batch": 2, "layer": 1, "place": "inner",
}  # fmt: skip


def mask_of(*, layer: int, place: Any, **key: int) -> torch.Tensor:
    masks, x = DeviceDropoutMasks(**key), torch.ones(20, 50)
    return masks.scale(x, rate=0.25, layer=layer, place=place, by_lane=True)


def test_the_same_place_has_the_same_mask() -> None:
    assert torch.equal(mask_of(**BASE), mask_of(**BASE))


@pytest.mark.parametrize("name", BASE)
def test_everything_else_has_another_mask(name: str) -> None:
    other = "embedding" if name == "place" else BASE[name] + 1
    assert not torch.equal(mask_of(**BASE), mask_of(**BASE | {name: other}))


def test_the_rate_and_the_scale() -> None:
    mask = mask_of(**BASE)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.2 < (mask == 0).double().mean() < 0.3


def test_bits_are_a_mask_too() -> None:
    key = {name: BASE[name] for name in ("seed", "step", "rank", "micro_batch")}
    x = torch.ones(3, 7, 101)
    bits = DeviceDropoutMasks(**key).keep_bits(x, rate=0.25, layer=1, place="inner")
    assert (bits.words.shape, bits.words.dtype) == ((3, 7, 7), torch.int16)
    mask = unpack(bits, x.shape)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.2 < (mask == 0).double().mean() < 0.3
    for position in range(16):  # of a word
        assert 0.1 < (mask[..., position::16] == 0).double().mean() < 0.4


def test_the_random_state_of_torch_does_not_change() -> None:
    before = torch.random.get_rng_state()
    mask_of(**BASE)
    assert torch.equal(torch.random.get_rng_state(), before)
