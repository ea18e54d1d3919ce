"""Memory for a loop of your own: agents, speech, music, any stream of vectors or ids.

    model = TransformerXL(ModelConfig(vocab_size=None, d_model=64, ...))
    memory = Memory.empty(model, num_rows=8)
    output_BTD, memory = memory.read(model, vectors_BTD, starts=is_first_BT)

A `Memory` is a `SequenceState` and the age of each row's next token, so that the caller counts
nothing. It is never changed: `read`, `reset` and the others return a new one (but see `cached`). A
row is one stream; where an episode begins in it, `starts` is true, also in the middle of a window,
and no token sees one of another episode. Attention adds its mask to scores, which does not hide NaN
and infinity. So rows that begin an episode get zeros, and a window is refused if it has several
episodes in a row that is not finite.

One step at a time, a window, and windows cut anywhere give the same numbers, as long as an episode
is not longer than the shortest memory of a layer: a layer sees that many tokens before the window.
With `same_length` every token sees exactly `mem_len` keys, so they do for episodes of any length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from txl_dist.model.memory import SequenceState
from txl_dist.model.memory.recurrent import KVCache, RecurrentMemory
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.model.visibility import check_targets

# Shapes: B rows, T tokens of a window, L layers, M memory tokens, D d_model


@dataclass(frozen=True, eq=False)
class Memory:
    """The state of B rows, and how many tokens of its episode each of them has read."""

    state: RecurrentMemory = field(repr=False)
    age_B: Tensor
    """int64: the age of the next token of each row; 0 sees nothing of the state."""

    @classmethod
    def empty(cls, model: TransformerXL, num_rows: int) -> "Memory":
        """Rows at the start of an episode, with the dtype and device of the model.

        Raises ValueError for a model of another kind of memory than the paper's.
        """
        state = model.empty_memory(num_rows)
        if not isinstance(state, RecurrentMemory):
            raise ValueError(
                f"model.memory={model.config.memory} cannot be kept row by row; use "
                "memory=recurrent, or model.empty_memory(num_rows) and its segments"
            )
        return cls(state, torch.zeros(num_rows, dtype=torch.int64, device=model.weight.device))

    def __len__(self) -> int:
        return len(self.age_B)

    def read(
        self,
        model: TransformerXL,
        input_BT: Tensor,
        *,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, "Memory"]:
        """The model's output [B, T, D] for a window, and the memory after it.

        `input_BT`: vectors [B, T, D], or ids [B, T] for a model with a vocabulary. `starts` [B, T]:
        true at the first token of an episode. Gradients reach the weights and the window, and stop
        at the memory. In training mode the model has dropout, except with a cached memory. Raises
        ValueError for wrong shapes, if a cached memory has been read before, and for NaN or
        infinity in a row in which an episode begins after its first token.
        """
        age_BT = self._ages(input_BT, starts)
        memory = self if starts is None else self.reset(starts[:, 0])
        output_BTD, state = model.hidden(input_BT, age_BT, memory.state)
        if starts is not None:
            _check_episodes_apart(output_BTD, starts)
        assert isinstance(state, RecurrentMemory)
        return output_BTD, Memory(state, age_BT[:, -1] + 1)

    def score(
        self,
        model: TransformerXL,
        input_BT: Tensor,
        target_BT: Tensor,
        *,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, "Memory"]:
        """Nats [B, T] of targets, for a model with a vocabulary; else as `read`."""
        check_targets(model.config, target_BT, input_BT)
        output_BTD, memory = self.read(model, input_BT, starts=starts)
        return model.softmax(output_BTD, target_BT, model.table), memory

    def _ages(self, input_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
        if input_BT.dim() < 2 or len(input_BT) != len(self):
            raise ValueError(
                f"the input has the shape {list(input_BT.shape)}: expected {len(self)} rows, those "
                "of the memory, and at least one token"
            )
        device = input_BT.device
        position_T = torch.arange(input_BT.shape[1], device=device)
        age_BT = self.age_B.to(device)[:, None] + position_T
        if starts_BT is None:
            return age_BT
        if starts_BT.dtype != torch.bool or starts_BT.shape != age_BT.shape:
            raise ValueError(
                f"starts has the dtype {starts_BT.dtype} and the shape {list(starts_BT.shape)}: "
                f"expected torch.bool {list(age_BT.shape)}"
            )
        begin_BT = torch.where(starts_BT.to(device), position_T, -1).cummax(dim=1).values
        return torch.where(begin_BT >= 0, position_T - begin_BT, age_BT)

    def reset(self, rows: Tensor | Sequence[int]) -> "Memory":
        """`rows` begin a new episode: a mask [B] of booleans, or row numbers, which may be none.

        They hold zeros then, so that nothing of the last episode is left, not even NaN. Raises
        ValueError for what may be a mask of 0 and 1: repeated numbers, or fractions. Raises
        IndexError for other rows than those of the memory.
        """
        rows = torch.as_tensor(rows, device=self.age_B.device)
        if rows.dtype != torch.bool:
            if rows.numel() and (rows.is_floating_point() or len(rows.unique()) < rows.numel()):
                raise ValueError(
                    f"rows {rows.tolist()} are not different numbers; write a mask as rows.bool()"
                )
            rows = rows.long()
        is_reset_B = torch.zeros_like(self.age_B, dtype=torch.bool)
        is_reset_B[rows] = True
        if not is_reset_B.any():  # as in most steps; the rest copies the memory
            return self
        return Memory(self.state.cleared(is_reset_B), self.age_B.masked_fill(is_reset_B, 0))

    def __getitem__(self, rows: Any) -> "Memory":
        """Some rows: a number, a slice, numbers or a mask of booleans. A slice is no copy."""
        rows = [rows] if isinstance(rows, int) else rows
        layers = tuple(layer[rows] for layer in self.state.layers)
        return Memory(RecurrentMemory(layers), self.age_B[rows])

    def with_rows(self, rows: Any, other: "Memory") -> "Memory":
        """This memory with the rows of `other` in place of `rows`. Raises ValueError if `other` has
        other layers, or another number of rows."""
        rows = [rows] if isinstance(rows, int) else rows
        old, new = self.state.layers, other.state.layers
        if [x[rows].shape for x in old] != [x.shape for x in new]:
            raise ValueError(
                f"rows {rows} of layers {[list(x.shape) for x in old]} cannot be replaced by "
                f"layers {[list(x.shape) for x in new]}"
            )
        age_B, *layers = (x.clone() for x in (self.age_B, *old))
        for tensor, rows_of_other in zip((age_B, *layers), (other.age_B, *new), strict=True):
            tensor[rows] = rows_of_other.to(tensor.device, tensor.dtype)
        return Memory(RecurrentMemory(tuple(layers)), age_B)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Memory":
        """Copied to another device or stored in another dtype."""
        layers = tuple(layer.to(device, dtype) for layer in self.state.layers)
        return Memory(RecurrentMemory(layers), self.age_B.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, to save them, for example with safetensors; see `of_tensors`."""
        return {**self.state.tensors(), "age": self.age_B}

    @classmethod
    def of_tensors(cls, model: TransformerXL, tensors: Mapping[str, Tensor]) -> "Memory":
        """From `tensors`. Raises ValueError if they are not the memory of such a model."""
        expected = cls.empty(model, 1).tensors()
        if tensors.keys() != expected.keys():
            raise ValueError(f"found the tensors {sorted(tensors)}, expected {sorted(expected)}")
        *layers, age_B = (tensors[name] for name in expected)
        return cls._checked(model, layers, age_B)

    def vectors(self) -> Tensor:
        """The layers' inputs [B, L, M, D], to store them once per sampled window."""
        if len(set(self.state.num_pasts)) > 1:
            raise ValueError("the layers have memories of different lengths; use tensors()")
        return torch.stack(self.state.layers, dim=1)

    def valid(self) -> Tensor:
        """Which of the M tokens belong to the row's episode, [B, M]; the last is the newest."""
        past = self.state.num_past
        return torch.arange(past, 0, -1, device=self.age_B.device) <= self.age_B[:, None]

    @classmethod
    def of_vectors(cls, model: TransformerXL, vectors: Tensor, valid: Tensor) -> "Memory":
        """From `vectors` [B, L, M, D] and `valid` [B, M], on the model's device.

        The valid tokens of a row must be its newest ones. Raises ValueError.
        """
        if vectors.dim() != 4 or valid.shape != (len(vectors), vectors.shape[2]):
            raise ValueError(
                f"vectors have the shape {list(vectors.shape)} and valid {list(valid.shape)}: "
                "expected [rows, layers, tokens, d_model] and [rows, tokens]"
            )
        if valid.dtype != torch.bool or (valid[:, 1:] < valid[:, :-1]).any():
            raise ValueError(
                "valid must be booleans, and the valid tokens of a row its newest: false, then true"
            )
        if len(set(model.config.mem_lens)) > 1:
            raise ValueError("the layers have memories of different lengths; use of_tensors()")
        vectors = vectors.masked_fill(~valid[:, None, :, None].to(vectors.device), 0)
        layers = vectors.to(model.weight.dtype).unbind(1)
        return cls._checked(model, layers, valid.sum(1))

    @classmethod
    def _checked(cls, model: TransformerXL, layers: Sequence[Tensor], age_B: Tensor) -> "Memory":
        """On the model's device. Raises ValueError if it is not the memory of such a model."""
        state = RecurrentMemory(tuple(layers))
        state.check(model.config, len(age_B))
        return cls(state, age_B).to(model.weight.device)

    def cached(self, model: TransformerXL) -> "Memory":
        """The same for constant weights without gradients: keys and values are kept too.

        A token then costs no projection of the memory. `read` and `reset` move the cache on, so a
        cached memory can be used once. After a change of weights, call it again on `uncached()`.
        """
        if isinstance(self.state, _CachedMemory):
            return self
        cache = KVCache.of_lengths(model.config, len(self), self.state.num_pasts)
        for number, layer_cache in enumerate(cache.layers):
            layer: Any = model.layers[number]
            with torch.no_grad():
                x_BMD = self.state.past(number, model.weight)
                x_BMD = layer.attention_norm(x_BMD) if layer.pre_lnorm else x_BMD
                layer_cache.append(*layer.attention.keys_and_values(x_BMD))
        return replace(self, state=_CachedMemory(self.state.layers, cache))

    def uncached(self) -> "Memory":
        """The memory without keys and values."""
        return Memory(RecurrentMemory(self.state.layers), self.age_B)


def _check_episodes_apart(output_BTD: Tensor, starts_BT: Tensor) -> None:
    has_several_B = starts_BT[:, 1:].any(1).to(output_BTD.device)
    wrong_B = has_several_B & ~output_BTD.detach().isfinite().flatten(1).all(1)
    if wrong_B.any():
        raise ValueError(
            f"row {int(wrong_B.nonzero()[0])} is not finite (NaN or infinity), and an episode "
            "begins in the middle of its window, so it reaches several episodes. Look for it in "
            "the vectors, the memory and the weights, or end the window before the first token of "
            "the episode, and read the rest as another window"
        )


@dataclass(frozen=True)
class _CachedMemory(RecurrentMemory):
    """Keys and values for the layers, with the inputs of which they were computed."""

    keys_values: KVCache
    is_spent: list[bool] = field(default_factory=list)
    """Not empty if the keys and values have moved on, so that they are no longer those of it."""
    is_trainable = False

    def past(self, number: int, x_BTD: Tensor) -> Any:
        if number == 0:  # a read that fails later has moved them on, too
            self._spend()
        return self.keys_values.layers[number]

    def after(self, hidden_BTD: Sequence[Tensor], age_BT: Tensor) -> "_CachedMemory":
        return _CachedMemory(super().after(hidden_BTD, age_BT).layers, self.keys_values)

    def cleared(self, lanes_B: Tensor) -> "_CachedMemory":
        self._spend()
        for layer in self.keys_values.layers:
            layer.clear(lanes_B)
        return _CachedMemory(super().cleared(lanes_B).layers, self.keys_values)

    def select(self, lanes: Sequence[int], num_removed: Sequence[int]) -> SequenceState:
        return RecurrentMemory(self.layers).select(lanes, num_removed)

    def _spend(self) -> None:
        if self.is_spent:
            raise ValueError(
                "this cached memory was read before, or reset, and its keys and values are those "
                "after that: call `uncached()` to use it again"
            )
        self.is_spent.append(True)
