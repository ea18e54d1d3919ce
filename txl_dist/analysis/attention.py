"""Attention by distance: the weights of every head, summed by the distance from query to key.

The text is read in the same chunks as in evaluation, so memory and ages are those of a scored
split. Only queries with a scored target count, each once. Weights are summed in float64, one
segment and layer at a time, and divided by the number of queries. So the shares of one head add
up to 1. For comparison, `even` has the shares if the weights of all visible keys were equal. Near
the start of a document few keys are visible, so short documents make the shares of the memory small
for any model.

`txl attention --out DIR` writes attention.json next to the plots, and `--json` prints the same
object. No code of this project reads it back. Its keys, where L is the number of layers, H of
heads, and D = mem_len + tgt_len of distances:

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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from data_pipeline.streams.segments import IGNORED
from data_pipeline.system.remote_path import DatasetPath
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.evaluation.job import EvaluationJob
from txl_dist.evaluation.scoring import EvaluationChunk, Scorer
from txl_dist.model.attention import AttentionWeightsCallback
from txl_dist.model.config import ModelConfig
from txl_dist.model.visibility import visible_keys
from txl_dist.sequence import SequenceReader

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

    Calls `on_progress(chunks done, chunks)`. Raises CheckpointError if a weight is NaN or Inf, and
    ConfigError for a memory whose keys are not one token each.
    """
    _require_tokens_as_keys(scorer.model.config)
    config, device, tgt_len = scorer.model.config, scorer.device, scorer.tgt_len
    # float64: the sums of a long text have millions of terms.
    heads = _Sums(config.n_layer, config.n_head, tgt_len, config.mem_len, device)
    even = _Sums(1, 1, tgt_len, config.mem_len, device)
    num_queries = num_done = 0
    for group in scorer.groups(chunks):
        # The whole memory, although a chunk may be shorter: `_Sums` counts all distances.
        state = scorer.model.inference_state(len(group))
        reader = SequenceReader(scorer.model, state=state, tgt_len=tgt_len)
        for segment in scorer.segments(group):
            scored_BT, on_attention_weights = segment.target_BT.to(device) != IGNORED, None
            age_BT = segment.age_BT.to(device)
            if scored_BT.any():
                even.callback(scored_BT)(0, _even_weights(config, age_BT))
                on_attention_weights = heads.callback(scored_BT)
                num_queries += int(scored_BT.sum())
            reader.read(segment.input_BT, age_BT, on_attention_weights=on_attention_weights)
        num_done += len(group)
        on_progress(num_done, len(chunks))
    return AttentionByDistance(
        heads=heads.mass(num_queries),
        even=even.mass(num_queries),
        num_queries=num_queries,
        tgt_len=tgt_len,
    )


def _require_tokens_as_keys(config: ModelConfig) -> None:
    if config.memory != "recurrent":
        raise ConfigError(
            f"attention by distance in tokens is not defined for model.memory={config.memory}: its "
            "keys are not one token each. Use txl recl or txl bench recall, which measure how far "
            "back a model uses its text"
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
            # A layer with a shorter memory gives nothing to the keys before it.
            missing = self._distance_TS.numel() // weight_BHTS.shape[2] - weight_BHTS.shape[3]
            weight_BHTS = pad(weight_BHTS, (missing, 0))
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
                f"attention weights of layer {layer} are NaN or Inf: the model overflows on this "
                "text. Try an earlier checkpoint: txl checkpoint list RUN"
            )
        return Mass(
            by_distance_LHD=(self._by_distance_LHD / num_queries).cpu(),
            memory_LH=(self._memory_LH / num_queries).cpu(),
            segment_LH=(self._segment_LH / num_queries).cpu(),
        )


ATTENTION_NAME = "attention.json"


def attention_json(attention: AttentionByDistance, job: EvaluationJob, model: ModelConfig) -> str:
    """The text of attention.json."""
    content = {
        "format": "txl-attention",
        "version": 1,
        "checkpoint": as_utf8(job.checkpoint),
        "data": as_utf8(job.data),
        "model": asdict(model),
        "settings": asdict(job.settings),
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


def as_utf8(path: Path | DatasetPath | str) -> str:
    """A path as valid text: bytes that are not UTF-8 become escapes such as \\xff."""
    return str(path).encode("utf-8", "backslashreplace").decode()
