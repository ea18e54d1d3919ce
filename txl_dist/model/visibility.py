"""What a segment must look like, and which keys a query may see.

    key j is visible to query i  iff  0 <= i - j <= age(i)  (and i - j < mem_len: `same_length`)

This is one rule for empty memory, document starts and `same_length`. The age of a token is its
distance to the first token of its document or stream (data_pipeline/streams/segments.py).

The checks raise one error that names what does not fit. Without them, a wrong age gives NaN, a
memory of one row is broadcast to all, and a token id outside an adaptive embedding has a vector of
zeros. Values are only read where no GPU has to be waited for.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import SequenceState

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """The rule for one segment, in the two ways in which implementations of attention apply it."""

    reach_BT: Tensor
    """A query sees the keys at distances 0 to its reach. B is the number of lanes, or 1."""
    mask_BTS: Tensor | None
    """To add to scores: 0 where a query may see a key, else minus infinity. None if the
    implementation of attention compares distances with `reach_BT` (`needs_triton`)."""

    @classmethod
    def of(
        cls,
        age_BT: Tensor,
        *,
        num_past: int,
        same_length: bool,
        num_groups: int = 1,
        mask_dtype: torch.dtype | None,
    ) -> Self:
        """`mask_dtype`: None leaves out the mask. `num_groups`: it has T rows for each of them."""
        reach_BT = age_BT.clamp(max=num_past - 1) if same_length else age_BT
        mask_BTS = None
        if mask_dtype is not None:
            visible_BTS = visible_keys(reach_BT, num_past=num_past)
            mask_BTS = mask_scores(visible_BTS, mask_dtype).repeat(1, num_groups, 1)
        return cls(reach_BT=reach_BT, mask_BTS=mask_BTS)

    @property
    def mask(self) -> Tensor:
        """`mask_BTS`, for an implementation that needs it."""
        assert self.mask_BTS is not None, "the chosen attention reads `reach_BT`"
        return self.mask_BTS


def visible_keys(age_BT: Tensor, *, num_past: int, same_length: bool = False) -> Tensor:
    """Booleans [B, T, S]. Every query sees at least itself, so no softmax row is empty.

    Query t is at position M + t of the keys, with M = `num_past`.
    """
    reach_BT = age_BT.clamp(max=num_past - 1) if same_length else age_BT
    # The same code for training, evaluation and a KVCache. Its mask and the addition of it cost
    # 0.4 % of a training step of benchmarks/model_speed.py.
    tgt_len = age_BT.shape[1]
    position_T = torch.arange(num_past, num_past + tgt_len, device=age_BT.device)
    position_S = torch.arange(num_past + tgt_len, device=age_BT.device)
    distance_TS = position_T[:, None] - position_S[None, :]
    return (distance_TS >= 0) & (distance_TS <= reach_BT[:, :, None])


def mask_scores(visible_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask to add to scores, [B, T, S]: 0 for visible keys, minus infinity for others."""
    mask_BTS = torch.zeros(visible_BTS.shape, dtype=dtype, device=visible_BTS.device)
    return mask_BTS.masked_fill_(~visible_BTS, -torch.inf)


# Shapes: B lanes, T segment tokens, M memory tokens, D d_model

_INTEGERS = (torch.int64, torch.int32)


def check_segment(
    config: ModelConfig, input_BT: Tensor, age_BT: Tensor, memory: SequenceState
) -> None:
    """Raises ValueError, or TypeError for something that is no memory."""
    is_read = _can_be_read(input_BT)
    if config.vocab_size is None or input_BT.is_floating_point():
        if input_BT.dim() != 3 or not input_BT.numel() or input_BT.shape[2] != config.d_model:
            raise ValueError(
                f"the input has the shape {list(input_BT.shape)}: vectors need [lanes, tokens, "
                f"d_model={config.d_model}], at least one of each"
            )
        if not input_BT.is_floating_point():
            raise ValueError(
                f"the input has the dtype {input_BT.dtype}: expected floating-point vectors"
            )
    else:
        if input_BT.dim() != 2 or not input_BT.numel():
            raise ValueError(
                f"input_BT has the shape {list(input_BT.shape)}: expected [lanes, tokens], at "
                "least one of each"
            )
        _check_integers("input_BT", input_BT, 0, config.vocab_size - 1, is_read=is_read)
    num_lanes, tgt_len = input_BT.shape[:2]
    if age_BT.shape not in ((num_lanes, tgt_len), (1, tgt_len)):  # one row: the ages of all lanes
        raise ValueError(
            f"age_BT has the shape {list(age_BT.shape)}, input_BT {list(input_BT.shape)}: every "
            "token needs an age, its distance to the start of its document or stream"
        )
    _check_integers("age_BT", age_BT, 0, None, is_read=is_read)
    if not isinstance(memory, SequenceState):
        raise TypeError(
            f"memory is {memory!r:.60}: expected what the previous segment returned, or "
            f"model.empty_memory({num_lanes}) at the start of streams"
        )
    memory.check(config, num_lanes)


def check_targets(config: ModelConfig, target_BT: Tensor, input_BT: Tensor) -> None:
    """Raises ValueError, also for a model of vectors, which has no targets."""
    if config.vocab_size is None:
        raise ValueError(
            "a model with vocab_size=null scores nothing: call `hidden`, which returns its output"
        )
    if target_BT.shape != input_BT.shape[:2]:
        raise ValueError(
            f"target_BT has the shape {list(target_BT.shape)}, input_BT {list(input_BT.shape)}: "
            "every token needs a target, which is -1 where nothing is scored"
        )
    # For a model on a GPU, targets are on the host: nothing is read there either.
    is_read = _can_be_read(input_BT)
    _check_integers("target_BT", target_BT, -1, config.vocab_size - 1, is_read=is_read)


def _can_be_read(input_BT: Tensor) -> bool:
    """Whether reading values waits for no GPU. Compilers and a FakeTensor have no values."""
    has_values = input_BT.numel() and type(input_BT) is Tensor
    is_on_cpu = input_BT.device.type == "cpu"
    return bool(has_values and is_on_cpu and not torch.compiler.is_compiling())


def _check_integers(
    name: str, tensor: Tensor, lowest: int, highest: int | None, *, is_read: bool
) -> None:
    """Raises ValueError for another dtype, and for values outside of [lowest, highest]."""
    if tensor.dtype not in _INTEGERS:
        raise ValueError(f"{name} has the dtype {tensor.dtype}: expected torch.int64 or int32")
    if not is_read:
        return
    smallest, largest = (int(value) for value in tensor.aminmax())
    if smallest < lowest or (highest is not None and largest > highest):
        limits = f"{lowest} to {highest}" if highest is not None else f"at least {lowest}"
        raise ValueError(f"{name} has values from {smallest} to {largest}: expected {limits}")
