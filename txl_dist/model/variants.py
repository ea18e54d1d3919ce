"""The distance encodings and attention forms that `ModelConfig` can name, and facts about each.

Imports no torch, so that a config can be checked without it. An implementation is named by
"module:name" and imported when a model needs it. To add an encoding or a form, write its class or
function and add one entry here.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingFacts:
    """One distance encoding: its class, and which options of `ModelConfig` it can have."""

    implementation: str
    """The class, a `DistanceEncoding` (encodings.py)."""
    allows_memory: bool = True
    """False if it encodes positions in the segment, so that memory tokens have no position.

    Such positions count from the segment's end, so inference must pad a segment to its full length.
    """
    needs_clamp_len: bool = False
    """It learns a vector per distance up to `clamp_len`, which is therefore fixed by training."""
    allows_clamp_len: bool = True
    even_size: Literal["d_model", "d_head"] | None = None
    """The size that must be even, because sines and cosines fill it in pairs."""
    has_position_biases: bool = False
    """It has the biases u and v, which all layers share unless `untie_r` is set."""
    multiplies_distances: bool = False
    """The query is multiplied by a vector per distance: one more matrix product per layer."""
    projects_distances: bool = False
    """Every layer projects the encoded distances: another matrix product per layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionForm:
    """One implementation of attention; all compute the same numbers (attention.py)."""

    implementation: str
    """An `AttentionFunction` (attention.py)."""
    supports_dropout: bool = True
    """Whether it can multiply the attention weights by a dropout mask."""
    reads_keep_bits: bool = False
    """It takes that mask as `KeepBits` (dropout.py), not as a tensor of factors."""
    has_fast_cpu_gradient: bool = True
    needs_triton: bool = False
    """It runs on GPUs, and elsewhere in triton's interpreter only, which is slow."""
    masks_by_reach: bool = False
    """It needs no mask [B, T, S] (visibility.py)."""
    max_d_head: int | None = None
    can_be_compiled: bool = True
    """Whether torch.compile accepts it (training/compilation.py)."""


DISTANCE_ENCODINGS = {
    "sinusoidal": EncodingFacts(
        implementation="txl_dist.model.encodings:Sinusoidal",
        even_size="d_model",
        has_position_biases=True,
        multiplies_distances=True,
        projects_distances=True,
    ),
    "shaw": EncodingFacts(
        implementation="txl_dist.model.encodings:Shaw",
        needs_clamp_len=True,
        multiplies_distances=True,
    ),
    "rotary": EncodingFacts(
        implementation="txl_dist.model.encodings:Rotary", even_size="d_head", allows_clamp_len=False
    ),
    "alibi": EncodingFacts(implementation="txl_dist.model.encodings:Alibi"),
    "absolute": EncodingFacts(
        implementation="txl_dist.model.encodings:Absolute", even_size="d_model", allows_memory=False
    ),
}
"""By the value of `ModelConfig.distance_encoding`."""

ATTENTION_FORMS = {
    # In order of preference: `auto` takes the first that supports the call and the device.
    "triton": AttentionForm(
        implementation="txl_dist.model.triton_attention:triton_attention",
        reads_keep_bits=True,
        needs_triton=True,
        masks_by_reach=True,
        max_d_head=256,
    ),
    "biased": AttentionForm(
        implementation="txl_dist.model.sdpa_attention:biased_attention",
        supports_dropout=False,
        has_fast_cpu_gradient=False,
    ),
    "fused": AttentionForm(
        implementation="txl_dist.model.cpu_attention:fused_attention", can_be_compiled=False
    ),
    "reference": AttentionForm(
        implementation="txl_dist.model.reference_attention:reference_attention"
    ),
}
"""By the value of `ModelConfig.attention`, which can also be `auto`."""
