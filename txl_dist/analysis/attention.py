"""Attention by distance: the weights of every head, summed by the distance from query to key.

The text is read in the same chunks as in evaluation. Only queries with a scored target count, each
once. For comparison, `even` has the shares if the weights of all visible keys were equal, in the
layers with the longest memory: short documents make the shares of the memory small for any model.

`txl attention --out DIR` writes attention.json next to the plots, and `--json` prints the same
object. Its keys, where L is the number of layers, H of heads, and D = mem_len + tgt_len:

    format, version    "txl-attention", 1
    checkpoint, data   paths or URLs
    model, settings    options of the model and of this reading, as in ModelConfig and txl eval
    num_queries        number of queries that were averaged
    distances          0, 1, ..., D - 1, in tokens
    heads, even        by_distance [L, H, D], memory [L, H], segment [L, H]: shares of 1;
                       mean_distance [L, H]: in tokens. `even` has L = H = 1.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from data_pipeline.streams.segments import IGNORED
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.evaluation.scoring import EvaluationChunk, Scorer
from txl_dist.evaluation.spec import EvaluationSpec
from txl_dist.model.config import ModelConfig
from txl_dist.model.visibility import visible_keys
from txl_dist.sequence import SequenceReader

# Shapes: L layers, H heads, D = M + T distances 0 to M + T - 1, B chunks of a batch, T segment
# tokens, M memory tokens, S = M + T keys


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mass:
    """Attention of each head, in float64: sums over queries, or their shares, which add up to 1."""

    by_distance_LHD: Tensor
    """Of the key at each distance 0, 1, ... before the query."""
    memory_LH: Tensor
    segment_LH: Tensor

    @classmethod
    def zeros(cls, num_layers: int, num_heads: int, num_distances: int, device: Any) -> Self:
        zeros_LHD = torch.zeros(
            num_layers, num_heads, num_distances, dtype=torch.float64, device=device
        )
        zeros_LH = zeros_LHD.sum(-1)
        return cls(
            by_distance_LHD=zeros_LHD, memory_LH=zeros_LH.clone(), segment_LH=zeros_LH.clone()
        )

    def add(self, layer: int, weight_BHTS: Tensor, scored_BT: Tensor) -> None:
        """Add the attention weights of a segment's scored queries, one lane at a time."""
        weight_HTS = torch.zeros_like(weight_BHTS[0], dtype=torch.float64)
        for lane_HTS, scored_T in zip(weight_BHTS, scored_BT, strict=True):
            # A float64 copy of all lanes needs twice the memory of the float32 weights.
            weight_HTS += lane_HTS.double() * scored_T[:, None]
        num_queries, num_keys = weight_HTS.shape[1:]
        # Distances from each query to each key. Future keys get distance 0: their weight is 0.
        position_T = torch.arange(num_keys - num_queries, num_keys, device=weight_HTS.device)
        position_S = torch.arange(num_keys, device=weight_HTS.device)
        distance_TS = (position_T[:, None] - position_S).clamp(min=0)
        self.by_distance_LHD[layer].index_add_(1, distance_TS.flatten(), weight_HTS.flatten(1))
        # The newest keys are the segment. A layer with a shorter memory has fewer keys before it.
        self.memory_LH[layer] += weight_HTS[..., :-num_queries].sum((1, 2))
        self.segment_LH[layer] += weight_HTS[..., -num_queries:].sum((1, 2))

    def shares(self, num_queries: int) -> Self:
        """Divided by the number of queries, on the CPU. Raises CheckpointError for NaN or Inf."""
        if not self.by_distance_LHD.isfinite().all():
            layer = int((~self.by_distance_LHD.isfinite()).any(-1).any(-1).int().argmax())
            raise CheckpointError(
                f"attention weights of layer {layer} are NaN or Inf: the model overflows on this "
                "text. Try an earlier checkpoint: txl checkpoint list RUN"
            )
        return type(self)(
            by_distance_LHD=(self.by_distance_LHD / num_queries).cpu(),
            memory_LH=(self.memory_LH / num_queries).cpu(),
            segment_LH=(self.segment_LH / num_queries).cpu(),
        )

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
    heads: Mass
    even: Mass
    """The shares for equal weights on all visible keys, as one layer and one head: that of a layer
    with the longest memory."""
    num_queries: int
    tgt_len: int
    """Keys at this distance or more are in memory. Nearer keys may be in memory or segment."""


def attention_by_distance(
    scorer: Scorer, chunks: Sequence[EvaluationChunk], *, on_progress: Callable[[int, int], None]
) -> AttentionByDistance:
    """Run the model on the chunks and sum the attention weights of every head by distance.

    Calls `on_progress(chunks done, chunks)`. Raises CheckpointError if a weight is NaN or Inf, and
    ConfigError for a memory whose keys are not one token each.
    """
    if not scorer.model.config.memory_facts.keys_are_tokens:
        raise ConfigError(
            "attention by distance in tokens is not defined for model.memory="
            f"{scorer.model.config.memory}: its keys are not one token each. Use txl recl or txl "
            "bench recall, which measure how far back a model uses its text"
        )
    config, device, tgt_len = scorer.model.config, scorer.device, scorer.tgt_len
    num_distances = config.mem_len + tgt_len
    heads = Mass.zeros(config.n_layer, config.n_head, num_distances, device)
    even = Mass.zeros(1, 1, num_distances, device)
    num_queries = num_done = 0
    for group in scorer.groups(chunks):
        # The whole memory, although a chunk may be shorter: all distances are counted.
        state = scorer.model.inference_state(len(group))
        reader = SequenceReader(scorer.model, state=state, tgt_len=tgt_len)
        for segment in scorer.segments(group):
            scored_BT, on_attention_weights = segment.target_BT.to(device) != IGNORED, None
            age_BT = segment.age_BT.to(device)
            if scored_BT.any():
                visible_BTS = visible_keys(
                    age_BT, num_past=config.mem_len, same_length=config.same_length
                )
                even_BTS = visible_BTS.double() / visible_BTS.sum(-1, keepdim=True)
                even.add(0, even_BTS[:, None], scored_BT)
                on_attention_weights = partial(heads.add, scored_BT=scored_BT)
                num_queries += int(scored_BT.sum())
            reader.read(segment.input_BT, age_BT, on_attention_weights=on_attention_weights)
        num_done += len(group)
        on_progress(num_done, len(chunks))
    return AttentionByDistance(
        heads=heads.shares(num_queries),
        even=even.shares(num_queries),
        num_queries=num_queries,
        tgt_len=tgt_len,
    )


def attention_json(attention: AttentionByDistance, spec: EvaluationSpec, model: ModelConfig) -> str:
    content = {
        "format": "txl-attention",
        "version": 1,
        "checkpoint": str(spec.checkpoint),
        "data": str(spec.data),
        "model": asdict(model),
        "settings": asdict(spec.settings),
        "num_queries": attention.num_queries,
        "distances": list(range(attention.heads.by_distance_LHD.shape[-1])),
        "heads": _mass(attention.heads),
        "even": _mass(attention.even),
    }
    return json.dumps(content, allow_nan=False)


def _mass(mass: Mass) -> dict[str, Any]:
    return {
        "by_distance": mass.by_distance_LHD.tolist(),
        "memory": mass.memory_LH.tolist(),
        "segment": mass.segment_LH.tolist(),
        "mean_distance": mass.mean_distance.tolist(),
    }
