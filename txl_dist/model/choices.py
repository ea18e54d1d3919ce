"""What a config can name: distance encodings, norms, kinds of memory, attention, and recipes.

To add one, write its class or function and add one entry here. Imports no torch.
"""

from dataclasses import dataclass
from typing import Any, Literal


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
class AttentionImplementation:
    """One implementation of attention; all compute the same numbers (attention/__init__.py).

    Its name is also that of its module in `txl_dist/model/attention` and of the function there.
    """

    name: str
    supports_dropout: bool = True
    """Whether it can multiply the attention weights by a dropout mask."""
    reads_keep_bits: bool = False
    """It takes that mask as `KeepBits` (dropout.py), not as a tensor of factors."""
    has_fast_cpu_gradient: bool = True
    needs_triton: bool = False
    """It runs on GPUs, and elsewhere in triton's interpreter only, which is slow."""
    masks_by_reach: bool = False
    """It needs no mask [B, T, S] (visibility.py)."""
    reads_projections: bool = False
    """Its module has a function `NAME_of_projections`, too, which copies no keys and values."""
    max_d_head: int | None = None
    can_be_compiled: bool = True
    """Whether torch.compile accepts it (training/compilation.py)."""

    @property
    def function(self) -> str:
        """Where its `AttentionFunction` is, as "module:name"."""
        return f"txl_dist.model.attention.{self.name}:{self.name}"

    @property
    def function_of_projections(self) -> str | None:
        """The same for a function that reads projections."""
        return f"{self.function}_of_projections" if self.reads_projections else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """One kind of memory: its class, and what a config has to know of it."""

    implementation: str
    """The class, a `MemoryKind` (memory/__init__.py), as "module:class"."""
    keys_are_tokens: bool = False
    """Attention sees the memory as keys of one token each, as many as `mem_len`. So distances are
    tokens, and the state of a lane can be taken at any token."""
    adds_tokens: bool = False
    """It adds `memory_tokens` tokens to every segment, which write the state. So the state depends
    on where segments end, and only the losses of later segments train what is written."""
    settings: tuple[str, ...] = ()
    """The settings of `ModelConfig` that have an effect on it."""

    @property
    def uses_mem_len(self) -> bool:
        return "mem_len" in self.settings


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

NORMS = {
    "layernorm": "torch.nn:LayerNorm",
    "rmsnorm": "txl_dist.model.norms:RmsNorm",
}
"""By the value of `ModelConfig.norm`: a module that is created with the width."""

FEED_FORWARDS = ("relu", "relu2", "swiglu")
"""The values of `feed_forward` (layer.py has the equations)."""

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "modern": {
        "norm": "rmsnorm",
        "pre_lnorm": True,
        "final_norm": True,
        "qk_norm": True,
        "attention_scale": 15.4,
        "output_gate": True,
        "feed_forward": "swiglu",
        "biases": False,
        "residual_scalars": True,
        "distance_encoding": "rotary",
        "tie_weight": False,
        "init_std": 0.03,
    },
}
"""By the value of `ModelConfig.recipe`: defaults of settings that differ from the paper's. Those of
the optimizer are in config/optimizer_config.py (docs/decisions/0072-a-block-of-today.md)."""

MEMORY_KINDS = {
    "recurrent": MemoryFacts(
        implementation="txl_dist.model.memory.recurrent:Recurrent",
        keys_are_tokens=True,
        settings=("mem_len", "mem_shares"),
    ),
    "compressive": MemoryFacts(
        implementation="txl_dist.model.memory.compressive:Compressive",
        settings=("mem_len", "compressed_len", "compression_rate"),
    ),
    "tokens": MemoryFacts(
        implementation="txl_dist.model.memory.tokens:MemoryTokens",
        adds_tokens=True,
        settings=("memory_tokens",),
    ),
    "recurrent+tokens": MemoryFacts(
        implementation="txl_dist.model.memory.tokens:RecurrentAndTokens",
        adds_tokens=True,
        settings=("mem_len", "mem_shares", "memory_tokens"),
    ),
}
"""By the value of `ModelConfig.memory`."""

# In order of preference: `auto` takes the first that supports the call and the device.
_ATTENTION = (
    AttentionImplementation(
        name="triton",
        reads_keep_bits=True,
        reads_projections=True,
        needs_triton=True,
        masks_by_reach=True,
        max_d_head=256,
    ),
    AttentionImplementation(name="sdpa", supports_dropout=False, has_fast_cpu_gradient=False),
    AttentionImplementation(name="cpu", can_be_compiled=False),
    AttentionImplementation(name="reference"),
)
ATTENTION_IMPLEMENTATIONS = {each.name: each for each in _ATTENTION}
"""By the value of `ModelConfig.attention`, which can also be `auto`."""
