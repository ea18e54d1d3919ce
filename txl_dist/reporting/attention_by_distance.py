"""Attention by distance: the weights of every head, summed by the distance from query to key.

The text is read in the same chunks as in evaluation, so memory and ages are those of a scored
split. Only queries with a scored target count, each once. Weights are summed in float64, one
segment and layer at a time, and divided by the number of queries. So the shares of one head add
up to 1.

For comparison the module also computes `even`: the shares if the weights of all visible keys
were equal. Near the start of a document few keys are visible, so short documents make the shares
of the memory small for any model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.streams.segments import IGNORED
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.chunks import EvaluationChunk
from txl_dist.evaluation.scoring import Scorer
from txl_dist.model.attention import AttentionWeightsCallback
from txl_dist.model.config import ModelConfig
from txl_dist.model.visibility import visible_keys

# Shapes: L layers, H heads, D = M + T distances 0 to M + T - 1, B chunks of a batch, T segment
# tokens, M memory tokens, S = M + T keys


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mass:
    """Shares of attention, which add up to 1; float64, on the CPU."""

    by_distance_LHD: Tensor
    """Share of the key at each distance 0, 1, ... before the query."""
    memory_LH: Tensor
    """Share of all keys in the memory."""
    segment_LH: Tensor
    """Share of all keys in the segment of the query."""

    @property
    def mean_distance(self) -> Tensor:
        """Mean distance of every head, in tokens, [L, H]."""
        distance_D = torch.arange(self.by_distance_LHD.shape[-1], dtype=torch.float64)
        return self.by_distance_LHD @ distance_D

    def reach(self, share: float) -> Tensor:
        """Smallest distance that covers `share` of the attention, averaged over heads, [L]."""
        reached_LD = self.by_distance_LHD.mean(1).cumsum(-1) >= share
        return reached_LD.int().argmax(-1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionByDistance:
    """The attention of a model on one text."""

    heads: Mass
    even: Mass
    """The shares for equal weights on all visible keys, as one layer and one head."""
    num_queries: int
    tgt_len: int
    """Keys at this distance or more are in memory. Nearer keys may be in memory or segment."""


def attention_by_distance(
    scorer: Scorer, chunks: Sequence[EvaluationChunk], *, on_progress: Callable[[int, int], None]
) -> AttentionByDistance:
    """Run the model on the chunks and sum the attention weights of every head by distance.

    Calls `on_progress(chunks done, chunks)`. Raises CheckpointError if a weight is not finite.
    """
    model, tgt_len = scorer.model, scorer.tgt_len
    config, device = model.config, next(model.parameters()).device
    # float64: the sums of a long text have millions of terms.
    heads = _Sums(config.n_layer, config.n_head, tgt_len, config.mem_len, device)
    even = _Sums(1, 1, tgt_len, config.mem_len, device)
    num_queries = num_done = 0
    for group in scorer.groups(chunks):
        cache = model.inference_state(len(group))  # changed in place by the model
        for segment in scorer.segments(group):
            input_BT, target_BT, age_BT = (tensor.to(device) for tensor in segment)
            scored_BT, on_attention_weights = target_BT != IGNORED, None
            if scored_BT.any():
                even.callback(scored_BT)(0, _even_weights(config, age_BT))
                on_attention_weights = heads.callback(scored_BT)
                num_queries += int(scored_BT.sum())
            with torch.no_grad():
                model.hidden(input_BT, age_BT, cache, on_attention_weights=on_attention_weights)
        num_done += len(group)
        on_progress(num_done, len(chunks))
    return AttentionByDistance(
        heads=heads.mass(num_queries),
        even=even.mass(num_queries),
        num_queries=num_queries,
        tgt_len=tgt_len,
    )


def _even_weights(config: ModelConfig, age_BT: Tensor) -> Tensor:
    """Equal weights on all visible keys, [B, 1, T, S]."""
    visible_BTS = visible_keys(age_BT, num_past=config.mem_len, same_length=config.same_length)
    return (visible_BTS.double() / visible_BTS.sum(-1, keepdim=True))[:, None]


class _Sums:
    """Sums of attention weights over queries, by distance and by memory or segment."""

    def __init__(
        self, num_layers: int, num_heads: int, tgt_len: int, mem_len: int, device: torch.device
    ) -> None:
        zeros = torch.zeros(num_layers, num_heads, dtype=torch.float64, device=device)
        self._memory_LH, self._segment_LH = zeros.clone(), zeros.clone()
        self._by_distance_LHD = zeros[..., None].repeat(1, 1, mem_len + tgt_len)
        position_T = torch.arange(mem_len, mem_len + tgt_len, device=device)
        position_S = torch.arange(mem_len + tgt_len, device=device)
        # Future keys get distance 0. Their weight is exactly 0, so they change no sum.
        self._distance_TS = (position_T[:, None] - position_S).clamp(min=0).flatten()
        self._mem_len = mem_len

    def callback(self, scored_BT: Tensor) -> AttentionWeightsCallback:
        """A callback that adds the attention weights of a segment's scored queries."""

        def add(layer: int, weight_BHTS: Tensor) -> None:
            weight_HTS = torch.zeros_like(weight_BHTS[0], dtype=torch.float64)
            for lane_HTS, scored_T in zip(weight_BHTS, scored_BT, strict=True):
                # One lane at a time: a float64 copy of all lanes needs twice the memory of the
                # float32 weights.
                weight_HTS += lane_HTS.double() * scored_T[:, None]
            self._by_distance_LHD[layer].index_add_(1, self._distance_TS, weight_HTS.flatten(1))
            self._memory_LH[layer] += weight_HTS[..., : self._mem_len].sum((1, 2))
            self._segment_LH[layer] += weight_HTS[..., self._mem_len :].sum((1, 2))

        return add

    def mass(self, num_queries: int) -> Mass:
        if not self._by_distance_LHD.isfinite().all():
            layer = int((~self._by_distance_LHD.isfinite()).any(-1).any(-1).int().argmax())
            raise CheckpointError(
                f"attention weights of layer {layer} are not finite: the model overflows on this "
                "text. Try an earlier checkpoint: txl checkpoint list RUN"
            )
        return Mass(
            by_distance_LHD=(self._by_distance_LHD / num_queries).cpu(),
            memory_LH=(self._memory_LH / num_queries).cpu(),
            segment_LH=(self._segment_LH / num_queries).cpu(),
        )
