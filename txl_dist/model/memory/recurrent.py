"""The paper's memory: the inputs of each layer for the previous `mem_len` tokens, without gradient.

    m_l = the last M rows of [m_l ; h_l]        h_l [T, D]: the input of layer l in a segment

Its shape is constant. At the start of a stream it holds zeros, which no query sees, because `age`
limits how far back a token may look (visibility.py).

It may be stored in another dtype than the model's (bf16 takes half the bytes). Each layer reads it
in the model's dtype.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import MemoryKind, SequenceState
from txl_dist.model.memory.kv_cache import KVCache, require_recurrent

# Shapes: B lanes, T segment tokens, M memory tokens, D d_model


class Recurrent(MemoryKind):
    """`model.memory: recurrent`. In inference its keys and values are cached."""

    def receptive_tokens(self, tgt_len: int) -> int:
        """Each layer sees its memory before its segment, so whole segments per layer.

        The dependency length O(N * L) of the paper, section 3.2.
        """
        return tgt_len * sum(-(-mem_len // tgt_len) for mem_len in self.config.mem_lens)

    def empty(
        self,
        num_lanes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "RecurrentMemory":
        lanes, width = num_lanes, self.config.d_model
        return RecurrentMemory(
            tuple(
                torch.zeros(lanes, mem_len, width, dtype=dtype, device=device)
                for mem_len in self.config.mem_lens
            )
        )

    def for_inference(
        self, num_lanes: int, *, max_tokens: int | None, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        return KVCache.empty(self.config, num_lanes, max_tokens=max_tokens)

    def fits(self, saved: ModelConfig) -> bool:
        """The same kind, and at least as many tokens in every layer."""
        lens = zip(saved.mem_lens, self.config.mem_lens, strict=True)
        return super().fits(saved) and all(old >= new for old, new in lens)


@dataclass(frozen=True)
class RecurrentMemory(SequenceState):
    """One tensor [B, M, D] per layer: `layers[l]` holds inputs of layer l."""

    layers: tuple[Tensor, ...]

    @property
    def num_pasts(self) -> tuple[int, ...]:
        """Tokens per lane and layer, including the zeros before the start of a stream."""
        return tuple(layer.shape[1] for layer in self.layers)

    def past(self, number: int, x_BTD: Tensor) -> Tensor:
        """The memory of a layer with the dtype of its input; itself if it has that."""
        return self.layers[number].to(x_BTD.dtype)

    def after(self, hidden_BTD: Sequence[Tensor], age_BT: Tensor) -> "RecurrentMemory":
        """The last M tokens of [memory ; the layer's inputs], in this memory's dtype."""
        return RecurrentMemory(
            tuple(
                _newest(old_BMD, new_BTD)
                for old_BMD, new_BTD in zip(self.layers, hidden_BTD[:-1], strict=True)
            )
        )

    def cleared(self, lanes_B: Tensor) -> "RecurrentMemory":
        """With zeros in the lanes that the mask names."""
        return RecurrentMemory(
            tuple(
                layer.masked_fill(lanes_B[:, None, None].to(layer.device), 0)
                for layer in self.layers
            )
        )

    def tensors(self) -> dict[str, Tensor]:
        return {f"layer-{number}": layer for number, layer in enumerate(self.layers)}

    def select(self, lanes: Sequence[int], num_removed: Sequence[int]) -> "RecurrentMemory":
        if any(num_removed):
            raise ValueError(
                "a RecurrentMemory has no older tokens to put in place of removed ones"
            )
        return RecurrentMemory(tuple(layer[list(lanes)] for layer in self.layers))

    def load_row(self, lane: int, saved: Mapping[str, Tensor]) -> None:
        """If `saved` has more tokens, the newest ones."""
        lens = {name: len(row) for name, row in self.row(lane).items()}
        newest = {name: row[len(row) - lens.get(name, 0) :] for name, row in saved.items()}
        super().load_row(lane, newest)

    def visible_share(self, ages: Sequence[int]) -> tuple[int, int]:
        """In tokens: a first token of age a may attend to a earlier ones, if they are kept."""
        return sum(min(age, self.num_past) for age in ages), self.num_past * len(ages)

    def check(self, config: ModelConfig, num_lanes: int) -> None:
        require_recurrent(config)
        shapes = [tuple(layer.shape) for layer in self.layers]
        # Another memory length than in training is allowed, as in evaluation.
        expected = [(num_lanes, shape[1], config.d_model) for shape in shapes]
        if config.same_length and not all(layer.shape[1] for layer in self.layers):
            raise ValueError("same_length=true needs a memory of at least one token in each layer")
        if len(shapes) != config.n_layer or shapes != expected:
            raise ValueError(
                f"the memory has {len(shapes)} layers, the first of shape {list(shapes[0])}: "
                f"expected {config.n_layer} of shape [{num_lanes}, mem_len, {config.d_model}], for "
                f"the lanes of input_BT; streams start with model.empty_memory({num_lanes})"
            )


def _newest(old_BMD: Tensor, new_BTD: Tensor) -> Tensor:
    """The last M tokens of both, in new storage with the dtype of `old_BMD`."""
    mem_len, tgt_len = old_BMD.shape[1], new_BTD.shape[1]
    num_new = min(mem_len, tgt_len)
    # Copied even if all of it is new: a view would keep the activations of the whole segment.
    next_BMD = torch.empty_like(old_BMD)
    next_BMD[:, : mem_len - num_new].copy_(old_BMD[:, num_new:])
    next_BMD[:, mem_len - num_new :].copy_(new_BTD[:, tgt_len - num_new :])
    return next_BMD
