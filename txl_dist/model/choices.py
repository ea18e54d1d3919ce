"""What a config can name: kinds of memory, distance encodings, norms, attention and recipes.

To add one, write its class or function and add one entry here. Imports no torch.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """What there is to know of one kind of memory without computing with it.

    What it computes is in its module (memory/__init__.py).
    """

    implementation: str
    """The class, a `MemoryKind`, as "module:class"."""
    keys_are_tokens: bool = False
    """Attention sees the memory as keys of one token each, as many as `mem_len`. So distances are
    tokens, the state of a lane can be taken at any token, and inference caches projected keys."""
    adds_tokens: bool = False
    """It adds `memory_tokens` tokens to both ends of a segment, which write the state. So the state
    depends on where segments end, and only the losses of later segments train what is written."""
    documents_are_independent: bool = True
    """Whether the losses of a document depend on nothing but it and the places where its segments
    end. It is read from its start then, even if `receptive_tokens` has no limit."""
    settings: tuple[str, ...] = ()
    """The settings of `ModelConfig` that have an effect on it."""

    @property
    def uses_mem_len(self) -> bool:
        return "mem_len" in self.settings


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
    rotates: bool = False
    """It rotates queries and keys, and has no other terms: all heads have the same."""
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

    Its name is also that of its function.
    """

    name: str
    is_for_inference: bool = False
    """It takes no dropout mask, and its gradient is slow."""
    needs_triton: bool = False
    """Its kernels run on GPUs, and elsewhere in triton's interpreter only, which is slow. They
    compute tile by tile: the dropout mask is `KeepBits` (dropout.py), a mask [B, T, S] is not
    needed (visibility.py), and keys and values can be read as they are projected."""
    is_for_cpus: bool = False
    """It does not run on GPUs."""
    max_d_head: float = math.inf
    can_be_compiled: bool = True
    """Whether torch.compile accepts it (training/compilation.py)."""

    @property
    def function(self) -> str:
        """Where its `AttentionFunction` is, as "module:name"."""
        module = "triton" if self.needs_triton else "torch_attention"
        return f"txl_dist.model.attention.{module}:{self.name}"


MEMORY_KINDS = {
    "recurrent": MemoryFacts(
        implementation="txl_dist.model.memory.recurrent:Recurrent",
        keys_are_tokens=True,
        settings=("mem_len", "mem_shares"),
    ),
    "compressive": MemoryFacts(
        implementation="txl_dist.model.memory.compressive:Compressive",
        # The tokens before a document decide which of its tokens share a slot.
        documents_are_independent=False,
        settings=("mem_len", "compressed_len", "compression_rate"),
    ),
    "tokens": MemoryFacts(
        implementation="txl_dist.model.memory.tokens:MemoryTokens",
        adds_tokens=True,
        settings=("memory_tokens",),
    ),
    "recurrent+tokens": MemoryFacts(
        implementation="txl_dist.model.memory.tokens:MemoryTokens",
        adds_tokens=True,
        settings=("mem_len", "mem_shares", "memory_tokens"),
    ),
}
"""By the value of `ModelConfig.memory`."""

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
        implementation="txl_dist.model.encodings:Rotary",
        rotates=True,
        even_size="d_head",
        allows_clamp_len=False,
    ),
    "alibi": EncodingFacts(implementation="txl_dist.model.encodings:Alibi"),
    "absolute": EncodingFacts(
        implementation="txl_dist.model.encodings:Absolute", even_size="d_model", allows_memory=False
    ),
}
"""By the value of `ModelConfig.distance_encoding`."""

NORMS = ("layernorm", "rmsnorm")
"""The values of `norm`."""

FEED_FORWARDS = ("relu", "relu2", "swiglu")
"""The values of `feed_forward` (layer_parts.py has the equations)."""

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "modern": {
        "norm": "rmsnorm",
        "norm_epsilon": 1e-6,
        "pre_lnorm": True,
        "final_norm": True,
        "qk_norm": True,
        "feed_forward": "swiglu",
        "biases": False,
        "distance_encoding": "rotary",
        "tie_weight": False,
        "init_std": 0.03,
    },
}
"""By the value of `ModelConfig.recipe`: defaults of settings that differ from the paper's. Those of
the optimizer are in config/training_config.py (docs/decisions/0072-a-block-of-today.md)."""

# In order of preference: `auto` takes the first that supports the call and the device.
_ATTENTION = (
    AttentionImplementation(name="triton", needs_triton=True, max_d_head=256),
    AttentionImplementation(name="sdpa", is_for_cpus=True, is_for_inference=True),
    AttentionImplementation(name="cpu", is_for_cpus=True, can_be_compiled=False),
    AttentionImplementation(name="reference"),
)
ATTENTION_IMPLEMENTATIONS = {each.name: each for each in _ATTENTION}
"""By the value of `ModelConfig.attention`, which can also be `auto`."""
