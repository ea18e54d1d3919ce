"""Kinds of memory: what a model carries from one segment to the next, by lane.

    recurrent.py     the inputs of each layer for the last tokens (the paper's); for inference, keys
                     and values
    compressive.py   the same, and averages of older tokens
    tokens.py        vectors that the model reads and writes as tokens of a segment

`MemoryKind` is what a kind computes from the config, `SequenceState` the state of some lanes. A new
kind is a module with both, an entry in `MEMORY_KINDS` of model/choices.py, and its settings. For
`txl export --format hf` it also needs its equations in convert/standalone.py. Nothing else knows
what a state holds: it is tensors with names, whose first dimension is the lanes. So training,
checkpoints, a resume on other ranks and evaluation work for every kind
(docs/decisions/0045-a-kind-of-memory.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from txl_dist.model.config import ModelConfig

# Shapes: B lanes, T segment tokens, M keys before the segment, D d_model


class SequenceState(ABC):
    """The state of B lanes between two segments. The model reads and replaces it:

    past = state.past(number, x)        for each layer, before it is computed
    state = state.after(hidden, age)    after the last layer
    """

    is_trainable: ClassVar[bool] = True
    """False if it works without gradients only, as a cache."""

    @property
    @abstractmethod
    def num_pasts(self) -> tuple[int, ...]:
        """M of each layer: the keys before the segment to which attention attends, at most."""

    @property
    def num_past(self) -> int:
        """That of the layer with the most."""
        return max(self.num_pasts)

    @property
    def num_past_tokens(self) -> int:
        """The tokens before the segment of which attention may see something, in any layer."""
        return self.num_past

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """That of the residual stream under autocast; None: that of the weights.

        A memory in bf16 holds what the layers have added up in bf16.
        """
        return None

    def reach(self, age_BT: Tensor) -> Tensor:
        """How many keys before itself a query of this age may see; more than M are all [B, T].

        Where every key is a token, that is the age.
        """
        return age_BT

    @abstractmethod
    def past(self, number: int, x_BTD: Tensor) -> Any:
        """What attention of layer `number` attends to before the segment.

        Inputs of the layer [B, M, D], with dtype and device of its input `x_BTD`, or a
        `LayerKVCache`.
        """

    @abstractmethod
    def after(self, hidden_BTD: Sequence[Tensor], age_BT: Tensor) -> "SequenceState":
        """The state after a segment with these ages, for the same lanes; this one is not changed.

        `hidden_BTD`: the input of each layer, then the output of the last one, with the tokens that
        `MemoryKind.added_tokens` added. A cache may change in place and return itself. Gradients
        stop here, because the model calls this without, but between the segments of one step
        (`training.backprop_segments`).
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All its tensors by name, not copied. Dimension 0 is the lanes."""

    def select(self, lanes: Sequence[int], num_removed: Sequence[int]) -> "SequenceState":
        """The state of these lanes, in this order, each without its newest `num_removed` tokens.

        A cache changes in place and returns itself. Raises ValueError if tokens of which no copy is
        kept would be needed; a cache can remove the tokens of the last segment. So lanes can read
        segments of different lengths: pad them at the end, and remove the padding.
        """
        if any(num_removed):
            name = type(self).__name__
            raise ValueError(f"a {name} has no older tokens to put in place of removed ones")
        state: Any = self  # a dataclass
        rows = list(lanes)
        return replace(state, **tree_map_only(Tensor, lambda x: x[rows], vars(self)))

    def row(self, lane: int) -> dict[str, Tensor]:
        """The state of one lane: views of its tensors."""
        return {name: tensor[lane] for name, tensor in self.tensors().items()}

    def load_row(self, lane: int, saved: Mapping[str, Tensor]) -> None:
        """Copy the state of one lane from a row of a model for which `MemoryKind.fits`.

        Raises ValueError if the row has other tensors, as that of a cache before its first segment.
        """
        row = self.row(lane)
        if row.keys() != saved.keys():
            raise ValueError(f"the saved memory has {sorted(saved)}, this one {sorted(row)}")
        for name, tensor in row.items():
            tensor.copy_(saved[name])

    def visible_share(self, ages: Sequence[int]) -> tuple[int, int]:
        """(what the first tokens of a segment may read of the state, all of it), over lanes.

        `ages`: of the first token of each lane. The unit is the kind's; here it is lanes.
        """
        return sum(age > 0 for age in ages), len(ages)

    def check(self, config: ModelConfig, num_lanes: int) -> None:
        """Raises ValueError if it is the state of another model, kind or number of lanes."""
        found, expected = _shapes(self), _expected_shapes(config, num_lanes)
        for name in expected | found:
            if found.get(name) != expected.get(name):
                raise ValueError(
                    f"{name} of the memory has the shape {found.get(name)}: expected "
                    f"{expected.get(name)}, that of model.memory={config.memory} and the lanes of "
                    f"the input; streams start with model.empty_memory({num_lanes})"
                )


def _shapes(state: SequenceState) -> dict[str, list[int]]:
    return {name: [*tensor.shape] for name, tensor in state.tensors().items()}


@lru_cache(maxsize=16)  # asked before every segment
def _expected_shapes(config: ModelConfig, num_lanes: int) -> dict[str, list[int]]:
    return _shapes(memory_kind(config).empty(num_lanes, device="meta"))


class MemoryKind(ABC):
    """What a kind of memory computes from one config. Its constants are in `MemoryFacts`."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def receptive_tokens(self, tgt_len: int) -> int | None:
        """The tokens before a segment of `tgt_len` that determine its state; a multiple of tgt_len.

        A lane that reads only these, with ages from 0, has the state of one that has read the whole
        text. None: there is no limit within a document.
        """

    @abstractmethod
    def empty(
        self,
        num_lanes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> SequenceState:
        """The state at the start of streams, whose ages start at 0.

        `dtype`: that of the model, or another one to store the state in; a kind may keep fp32.
        """

    def for_inference(
        self, num_lanes: int, *, max_tokens: int | None, dtype: torch.dtype, device: torch.device
    ) -> SequenceState:
        """As `empty`, if weights are constant and there are no gradients: the fastest state.

        `max_tokens`: no segment has more tokens before it than this.
        """
        return self.empty(num_lanes, dtype=dtype, device=device)

    def added_tokens(self) -> Any:
        """The module that adds tokens to segments (tokens.py), or None."""
        return None

    def fits(self, saved: ModelConfig) -> bool:
        """Whether the rows of a model `saved` can be loaded (`SequenceState.load_row`)."""
        return saved.memory == self.config.memory


def memory_kind(config: ModelConfig) -> MemoryKind:
    """The kind that the config names."""
    kind: type[MemoryKind] = resolve_name(config.memory_facts.implementation)
    return kind(config)


def stored_like(old: Tensor, new: Tensor) -> Tensor:
    """A copy of `new` with the dtype and device of `old`.

    Always a copy: a view would keep the activations of the whole segment.
    """
    copy = torch.empty(new.shape, dtype=old.dtype, device=old.device)
    return copy.copy_(new)
