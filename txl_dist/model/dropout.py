"""Dropout with masks from the caller, so that they can be the same for any number of ranks.

`txl train` passes `LaneDropoutMasks`, which apply in either mode of the model: a function of (seed,
step, lane, layer, place). If a caller passes none, the model does as any nn.Module: in training
mode it draws `DeviceDropoutMasks` that depend on torch's default generator, in evaluation mode
nothing is dropped. The model has no random state. See docs/decisions/0004-no-random-state.md.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.library import register_autograd

from txl_dist.model.devices import define_operator, to_device

Place = Literal[
    "embedding", "distances", "attention weights", "attention", "inner", "feed-forward", "output"
]


class KeepBits(NamedTuple):
    """A dropout mask with one bit per element, for a kernel that reads tiles of it."""

    words: Tensor
    """int16, shaped like the masked tensor but for its last dimension, which has one word per 16
    elements: element n is kept if bit n % 16 of word n // 16 is 1."""
    factor: float
    """What kept elements are multiplied by, 1 / (1 - rate)."""


class Dropout(nn.Module):
    """Sets a fraction `rate` of its input to 0 and scales the rest by 1 / (1 - rate)."""

    layer_number: Tensor

    def __init__(self, rate: float, *, layer: int, place: Place, by_lane: bool = True) -> None:
        """`by_lane`: dimension 0 of the input is the lanes; else all lanes share a mask."""
        super().__init__()
        self.rate, self.layer, self.by_lane = rate, layer, by_lane
        self.place: Place = place
        # All layers share one compiled function, which depends on a number but not on a tensor.
        # On the CPU also where models are built without values (`torch.device("meta")`): it is not
        # loaded afterwards.
        number = torch.tensor(layer, device="cpu")
        self.register_buffer("layer_number", number, persistent=False)

    @property
    def threshold(self) -> int:
        """Masks by lane keep levels from this one on: `rate`, rounded to 1/65,536."""
        return round(self.rate * _LEVELS)

    def forward(self, x: Tensor, masks: "DropoutMasks | None") -> Tensor:
        scale = self.scale(x, masks)
        return x if scale is None else x * scale

    def scale(self, x: Tensor, masks: "DropoutMasks | None") -> Tensor | None:
        """The factor for `x`, or None if nothing is dropped. The values of `x` are not used."""
        return None if masks is None or self.rate == 0 else self.draw(x, masks)

    def keep_bits(self, x: Tensor, masks: "DropoutMasks | None") -> KeepBits | None:
        """`scale` as bits."""
        return None if masks is None or self.rate == 0 else self.draw_bits(x, masks)

    def of_relu(self, x: Tensor, masks: "DropoutMasks | None") -> Tensor | None:
        """`forward(relu(x))` by one kernel of a GPU; None without one, or if nothing is dropped."""
        if not isinstance(masks, GpuLaneDropoutMasks) or self.rate == 0:
            return None
        return masks.scaled_relu(x, self)

    def draw(self, x: Tensor, masks: "DropoutMasks") -> Tensor:
        """The masks for `x`. Separate, because `training.compile` may not compile it."""
        return masks.scale(x, self)

    def draw_bits(self, x: Tensor, masks: "DropoutMasks") -> KeepBits:
        """`draw` as bits."""
        return masks.keep_bits(x, self)


class DropoutMasks(Protocol):
    """The masks of one step, each a function of (seed, step, lane) and the place of a dropout."""

    def of_segment(self, number: int, num_segments: int) -> "DropoutMasks":
        """Those of one of the segments that a step reads; themselves if it is one."""

    def scale(self, x: Tensor, dropout: Dropout) -> Tensor:
        """0 or 1 / (1 - rate), shaped like `x`."""

    def keep_bits(self, x: Tensor, dropout: Dropout) -> KeepBits:
        """A mask as bits; for masks by lane, that of `scale`."""


def on_device(masks: DropoutMasks, device: torch.device) -> DropoutMasks:
    """The same masks; on GPUs, a kernel draws those by lane."""
    if device.type == "cuda" and isinstance(masks, LaneDropoutMasks):
        return GpuLaneDropoutMasks.of(masks, device)
    return masks


class DeviceDropoutMasks:
    """Masks of one forward, from torch's generator of the device.

    `torch.manual_seed` makes them repeatable. A mask is a function of integers, so that it can be
    drawn again in the backward of activation checkpointing.
    """

    def __init__(self, *, seed: int | None = None, segment: int = 0) -> None:
        self._seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        self._segment = segment

    def of_segment(self, number: int, num_segments: int) -> "DeviceDropoutMasks":
        """Other masks for each segment."""
        return DeviceDropoutMasks(seed=self._seed, segment=number)

    def scale(self, x: Tensor, dropout: Dropout) -> Tensor:
        scale = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return self._draw(scale, dropout).div_(1 - dropout.rate)

    def keep_bits(self, x: Tensor, dropout: Dropout) -> KeepBits:
        """Another mask than `scale`, as bits."""
        num_words = math.ceil(x.shape[-1] / 16)
        shape = (*x.shape[:-1], 2 * num_words, 8)
        keep = self._draw(torch.empty(shape, dtype=torch.uint8, device=x.device), dropout)
        bit_values = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
        octets = keep.mul_(bit_values).sum(-1, dtype=torch.uint8)
        return KeepBits(octets.view(torch.int16), 1 / (1 - dropout.rate))

    def _draw(self, result: Tensor, dropout: Dropout) -> Tensor:
        """`result`, filled with 0 (at `rate`) and 1."""
        # By place, not in order: backward may draw them again in another one. The zeros keep the
        # masks of earlier versions.
        key = struct.pack("<5q", self._seed, self._segment, 0, 0, dropout.layer)
        digest = hashlib.blake2b(key + dropout.place.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
        generator = torch.Generator(result.device).manual_seed(seed)
        return result.bernoulli_(1 - dropout.rate, generator=generator)


_PLACES = {place: number for number, place in enumerate(get_args(Place))}
_ALL_LANES = 2**32 - 1
"""Lane number of a mask that all lanes share."""
_LEVELS = 2**16

# Shapes: B rows (lanes), N elements of a row


class LaneDropoutMasks:
    """Masks for the rows of one micro-batch at one step; a padding row has lane -1.

    A run draws the same masks on any number of ranks, in any micro-batches, after any resume and on
    any device, because each mask has its own range of a counter-based generator: Philox-4x64-10
    (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). numpy guarantees that the
    raw stream of a bit generator does not change between versions; torch has no such guarantee.
    """

    def __init__(self, *, seed: int, step: int, lanes: Sequence[int]) -> None:
        self.key = (seed, step)
        self.lanes = lanes

    def of_segment(self, number: int, num_segments: int) -> "LaneDropoutMasks":
        """Those of step `step * num_segments + number`."""
        seed, step = self.key
        return LaneDropoutMasks(seed=seed, step=step * num_segments + number, lanes=self.lanes)

    def scale(self, x: Tensor, dropout: Dropout) -> Tensor:
        mask = torch.from_numpy(self._is_kept(x.shape, dropout)).to(x.device)
        return mask.to(x.dtype) * keep_factor(dropout.threshold)

    def keep_bits(self, x: Tensor, dropout: Dropout) -> KeepBits:
        """The same mask as bits, on the host."""
        no_padding, padding = [(0, 0)] * (x.dim() - 1), (0, -x.shape[-1] % 16)
        is_kept = np.pad(self._is_kept(x.shape, dropout), [*no_padding, padding])
        octets = np.packbits(is_kept, axis=-1, bitorder="little")
        words = torch.from_numpy(octets.view("<i2").astype(np.int16))
        return KeepBits(words, keep_factor(dropout.threshold))

    def _is_kept(self, shape: torch.Size, dropout: Dropout) -> np.ndarray:
        """Booleans of this shape: whether the level of an element, in [0, 65536), is kept."""
        lanes = self.lanes if dropout.by_lane else (_ALL_LANES,)
        count = shape.numel() // len(lanes)
        level_BN = np.stack([self._levels(lane, dropout, count) for lane in lanes])
        return (level_BN >= dropout.threshold).reshape(shape)

    def _levels(self, lane: int, dropout: Dropout, count: int) -> np.ndarray:
        # Philox increments the first word of the counter; the other words identify the mask.
        place, layer = _PLACES[dropout.place], dropout.layer
        counter = np.array([0, place, layer, lane % 2**32], dtype=np.uint64)
        generator = np.random.Philox(key=np.array(self.key, dtype=np.uint64), counter=counter)
        # Each 64-bit word gives 4 integers of 16 bits, the same on any byte order.
        return generator.random_raw((count + 3) // 4).astype("<u8").view("<u2")[:count]


class GpuLaneDropoutMasks:
    """The masks of a `LaneDropoutMasks`, with the same bits, by the kernels of kernels.py.

    All that differs between steps, layers and micro-batches is in tensors, so one compiled function
    serves them all.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        """Seed and step, lanes, and the number of masks that all lanes share."""
        self.key_2, self.lane_B, self.all_1 = numbers[:2], numbers[2:-1], numbers[-1:]

    @classmethod
    def of(cls, masks: LaneDropoutMasks, device: torch.device) -> Self:
        """Those of `masks` on a GPU."""
        lanes = [*(lane % 2**32 for lane in masks.lanes), _ALL_LANES]
        return cls(to_device(torch.tensor([*masks.key, *lanes]), device))

    def of_segment(self, number: int, num_segments: int) -> Self:
        seed, step = self.key_2.unbind()
        key_2 = torch.stack([seed, step * num_segments + number])
        return type(self)(torch.cat([key_2, self.numbers[2:]]))

    def scale(self, x: Tensor, dropout: Dropout) -> Tensor:
        if not torch.compiler.is_compiling():
            return torch.ops.txl_dist.lane_dropout_scale(*self._mask(dropout), x.shape, x.dtype)
        # Compiled code unpacks the bits where it uses the mask, and again in backward, so that it
        # stores the words only. torch's partitioner stores the unpacked mask instead if it is
        # computed in int64, or if two masks use the same arange.
        words, factor = self.keep_bits(x, dropout)
        start = 16 * _PLACES[dropout.place]
        place_16 = torch.arange(start, start + 16, dtype=torch.int16, device=words.device)
        bits = (words[..., None] >> (place_16 - start)) & 1
        return bits.flatten(-2)[..., : x.shape[-1]].to(x.dtype) * factor

    def keep_bits(self, x: Tensor, dropout: Dropout) -> KeepBits:
        words = torch.ops.txl_dist.lane_dropout_bits(*self._mask(dropout), x.shape)
        return KeepBits(words, keep_factor(dropout.threshold))

    def scaled_relu(self, x: Tensor, dropout: Dropout) -> Tensor:
        """relu(x) multiplied by `scale`, without a mask in memory."""
        return torch.ops.txl_dist.lane_dropout_relu(x, *self._mask(dropout))

    def _mask(self, dropout: Dropout) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """What determines a mask, as the operators below take it."""
        lane_B = self.lane_B if dropout.by_lane else self.all_1
        place = _PLACES[dropout.place]
        return lane_B, self.key_2, dropout.layer_number, place, dropout.threshold


def keep_factor(threshold: int, dtype: torch.dtype = torch.float64) -> float:
    """What kept elements are multiplied by, rounded as torch rounds a number for this dtype."""
    factor = _LEVELS / (_LEVELS - threshold)
    for each in (torch.float32, dtype) if dtype != torch.float64 else ():
        num_bits = 1 - round(math.log2(torch.finfo(each).eps))
        mantissa, exponent = math.frexp(factor)
        factor = math.ldexp(round(math.ldexp(mantissa, num_bits)), exponent - num_bits)
    return factor


_MASK = "Tensor lane, Tensor key, Tensor layer, int place, int threshold"
define_operator(
    "lane_dropout_scale",
    f"({_MASK}, SymInt[] shape, ScalarType dtype) -> Tensor",
    kernel="txl_dist.model.kernels:lane_dropout_scale",
    empty_results=lambda lane_B, *mask: lane_B.new_empty(mask[-2], dtype=mask[-1]),
)
define_operator(
    "lane_dropout_bits",
    f"({_MASK}, SymInt[] shape) -> Tensor",
    kernel="txl_dist.model.kernels:lane_dropout_bits",
    empty_results=lambda lane_B, *mask: lane_B.new_empty(
        *mask[-1][:-1], math.ceil(mask[-1][-1] / 16), dtype=torch.int16
    ),
)
define_operator(
    "lane_dropout_relu",
    f"(Tensor x, {_MASK}) -> Tensor",
    kernel="txl_dist.model.kernels:lane_dropout_relu",
    empty_results=lambda x, *mask: x.new_empty(x.shape),
)


def _save_result(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.factor = keep_factor(inputs[-1], output.dtype)
    ctx.save_for_backward(output)


def _gradient_of_relu(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
    """The result is positive where the input was and the mask is."""
    (output,) = ctx.saved_tensors
    return torch.where(output <= 0, 0, d_output * ctx.factor), None, None, None, None, None


register_autograd("txl_dist::lane_dropout_relu", _gradient_of_relu, setup_context=_save_result)
