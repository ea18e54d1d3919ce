"""The architecture of one Transformer-XL, as frozen data that is checked when it is created.

choices.py lists what else it can name. Names follow the paper's code (arXiv:1901.02860) where it
has the same option. Imports no torch, so a run's config can be loaded and checked without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

from txl_dist.model.choices import (
    ATTENTION_IMPLEMENTATIONS,
    DISTANCE_ENCODINGS,
    FEED_FORWARDS,
    MEMORY_KINDS,
    NORMS,
    RECIPES,
    EncodingFacts,
    MemoryFacts,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """How a model of longer texts turns its rotary planes more slowly than it first did."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: str
    """`linear`: all planes, by `factor`. `llama3`: planes that turn less than `low_turns` times in
    `original_len` tokens by `factor`, those of more than `high_turns` not at all, a mean between.
    """
    factor: float
    low_turns: float = 1.0
    high_turns: float = 4.0
    original_len: int = 8192

    def __post_init__(self) -> None:
        _require_known("rotary_scaling.kind", self.kind, ("linear", "llama3"))
        if self.factor < 1 or not 0 < self.low_turns < self.high_turns or self.original_len < 1:
            raise ValueError(
                f"rotary_scaling={self} needs a factor of at least 1, 0 < low_turns < high_turns "
                "and a length of at least 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """All options that determine the parameters of a model and the function it computes."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    recipe: str = "paper"
    """Where a run's YAML has no value for a setting of `model` or `optimizer`: `paper`, the
    defaults listed here, or `modern`: the block of Qwen3 (pre-norm with RMSNorm, norms of queries
    and keys, rotary distances, SwiGLU, no biases), trained with Muon (`RECIPES` has the values). In
    Python only a name: use `of_recipe`."""
    vocab_size: int | None = 0
    """Number of token ids. 0 in a run's YAML: the vocabulary size of the data. null: a model of
    vectors, without embedding and softmax, for a loop of your own."""
    n_layer: int = 4
    """Number of layers."""
    d_model: int = 128
    """Width of the input and the output of each layer."""
    n_head: int = 4
    """Attention heads per layer."""
    n_kv_head: int | None = None
    """Heads of keys and values, each of which `n_head / n_kv_head` heads of queries read; null is
    `n_head`. Fewer need a distance encoding of `rotary`."""
    d_head: int = 32
    """Width of queries, keys and values of one head."""
    d_inner: int = 512
    """Width of the hidden layer of the feed-forward sublayer."""
    d_embed: int | None = None
    """Width of the token embedding; null is `d_model`. Another width adds projections."""
    memory: str = "recurrent"
    """What a lane carries from segment to segment: `recurrent`, the paper's memory; `compressive`,
    which also keeps older tokens, averaged in groups; `tokens`, a few vectors that the model reads
    and writes as tokens; `recurrent+tokens`, both; or `none`, another way to write `recurrent` with
    a `mem_len` of 0."""
    mem_len: int = 128
    """Tokens of memory per lane and layer; 0 disables recurrence. Without effect for `tokens`."""
    mem_shares: tuple[float, ...] = ()
    """Memory length of each layer as a share of `mem_len`, repeated over the layers: `[0.25, 1]`
    alternates short and long memories. [] is `mem_len` in every layer."""
    compressed_len: int | None = None
    """Slots of a compressive memory, each for `compression_rate` tokens that are older than
    `mem_len`. null is `mem_len // compression_rate`, which doubles the reach."""
    compression_rate: int = 4
    """Tokens of which one slot of a compressive memory is the mean."""
    memory_tokens: int = 8
    """Tokens that `tokens` and `recurrent+tokens` add to both ends of a segment, to read and write
    the memory."""
    distance_encoding: str = "sinusoidal"
    """How attention depends on distances: `sinusoidal` (the paper's); `shaw`, a learned vector per
    distance up to `clamp_len`; `rotary`; `alibi`; or `absolute` positions in the segment, which
    allow no memory."""
    clamp_len: int | None = None
    """Larger distances are encoded as this one; null encodes every distance."""
    same_length: bool = False
    """Every query sees exactly `mem_len` keys, its own included."""
    rotary_base: float = 10000.0
    """Of `rotary` distances: the slowest plane turns by about 1 / `rotary_base` per token."""
    rotary_scaling: RotaryScaling | None = None
    """Of `rotary` distances of models that were trained on longer texts in the end, such as Llama
    3.1: {kind: llama3, factor: 8} or {kind: linear, factor: 2}."""
    scale_embedding: bool = True
    """Multiply the vectors of tokens by sqrt(d_model), as the paper's code does."""
    tie_weight: bool = True
    """Share the weights of embedding and softmax; its biases, if any, are its own."""
    cutoffs: tuple[int, ...] = ()
    """First token id of each cluster after the first; [] is one cluster. Needs ids that are sorted
    by frequency, as those of word tokenizers are."""
    div_val: int = 1
    """The embedding of cluster i is `div_val ** i` times narrower; 1 is one table for all."""
    tie_projs: tuple[bool, ...] = ()
    """Per cluster: share the projection of the embedding with the softmax."""
    untie_r: bool = False
    """Each layer has its own position biases u and v, instead of one pair for all layers."""
    pre_lnorm: bool = False
    """Normalise the input of each sublayer (pre-norm) instead of its output (post-norm)."""
    norm: str = "layernorm"
    """`layernorm`, or `rmsnorm`: divide by the root mean square. Both have gains."""
    norm_epsilon: float = 1e-5
    """Added to the variance, or the mean square, that a norm divides by the root of."""
    final_norm: bool = False
    """Normalise the output of the last layer."""
    qk_norm: bool = False
    """RMS norm of each head's queries and keys, those of the memory too, with gains that all heads
    share, before they are rotated."""
    qkv_biases: bool = False
    """Queries, keys and values have biases, as those of Qwen2."""
    feed_forward: str = "relu"
    """Activation of the feed-forward sublayer: `relu`, `relu2` (its square) or `swiglu`."""
    biases: bool = True
    """The feed-forward and the softmax have biases."""
    dropout: float = 0.0
    """Dropout of embeddings, encoded distances, hidden layers, sublayers and the model's output."""
    dropatt: float = 0.0
    """Dropout of attention weights."""
    attention: str = "auto"
    """The implementation of attention: `triton` (kernels for GPUs), `sdpa` (torch's), `cpu`,
    `reference` (plain operations), or `auto`, the fastest that fits."""
    init_std: float = 0.02
    """Standard deviation of initial weights, position biases and LayerNorm gains. The gains of RMS
    norms start at 1, those of queries and keys at 3.9 / d_head^(1/4)."""
    proj_init_std: float = 0.01
    """Standard deviation of the initial projections of embedding and softmax."""

    def __post_init__(self) -> None:
        if self.memory == "none":
            object.__setattr__(self, "memory", "recurrent")
            object.__setattr__(self, "mem_len", 0)
        for name, known in (
            ("distance_encoding", DISTANCE_ENCODINGS),
            ("memory", (*MEMORY_KINDS, "none")),
            ("recipe", RECIPES),
            ("norm", NORMS),
            ("feed_forward", FEED_FORWARDS),
            ("attention", ("auto", *ATTENTION_IMPLEMENTATIONS)),
        ):
            _require_known(name, getattr(self, name), known)
        self._check_numbers()
        self._check_encoding()
        self._check_memory()
        self._check_clusters()

    @classmethod
    def of_recipe(cls, recipe: str, **settings: Any) -> Self:
        """A config with the defaults of a recipe. Raises ValueError for an unknown name."""
        _require_known("recipe", recipe, RECIPES)
        return cls(recipe=recipe, **(RECIPES[recipe] | settings))

    def _check_numbers(self) -> None:
        for name, minimum in _MINIMUMS.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value} must be at least {minimum}")
        for name in ("norm_epsilon", "rotary_base"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.n_head % self.num_kv_heads:
            raise ValueError(
                f"n_kv_head={self.n_kv_head} must divide n_head={self.n_head}: each head of keys "
                "and values belongs to equally many heads of queries"
            )
        for name in ("dropout", "dropatt"):
            if not 0 <= getattr(self, name) <= 0.99:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 0.99]")
        facts = ATTENTION_IMPLEMENTATIONS.get(self.attention)
        if facts is not None and self.d_head > facts.max_d_head:
            raise ValueError(
                f"attention={self.attention} supports d_head up to {facts.max_d_head}, not "
                f"{self.d_head}; use attention=auto"
            )

    def _check_encoding(self) -> None:
        name, encoding = self.distance_encoding, self.encoding
        if encoding.even_size and (size := getattr(self, encoding.even_size)) % 2:
            raise ValueError(
                f"{encoding.even_size}={size} must be even for distance_encoding={name}, which "
                f"fills it with pairs of sine and cosine; use {size + 1}"
            )
        if encoding.needs_clamp_len and self.clamp_len is None:
            raise ValueError(
                f"distance_encoding={name} learns a vector for each distance up to clamp_len; set "
                "clamp_len, for example to mem_len + tgt_len - 1"
            )
        if self.clamp_len is not None and not encoding.allows_clamp_len:
            raise ValueError(
                f"clamp_len={self.clamp_len} is not supported by distance_encoding={name}; use null"
            )
        if self.memory_facts.adds_tokens and not encoding.allows_memory:
            raise ValueError(
                f"memory={self.memory} adds tokens to segments, to which distance_encoding={name} "
                "gives no position; use another distance_encoding"
            )
        if self.mem_len and not encoding.allows_memory:
            raise ValueError(
                f"mem_len={self.mem_len} is not supported by distance_encoding={name}, which "
                "encodes positions in the segment only; use 0, or another distance_encoding"
            )
        for setting, neutral in _ROTARY_ONLY.items():
            if getattr(self, setting) != neutral and not encoding.rotates:
                raise ValueError(
                    f"{setting}={getattr(self, setting)} is not supported by distance_encoding="
                    f"{name}; leave it out, or use rotary"
                )
        if self.num_kv_heads < self.n_head and not encoding.rotates:
            raise ValueError(
                f"n_kv_head={self.n_kv_head} for n_head={self.n_head} is not supported by "
                f"distance_encoding={name}, whose scores differ by head; use rotary"
            )
        if self.untie_r and not encoding.has_position_biases:
            raise ValueError(
                f"untie_r=true is not supported by distance_encoding={name}; use false"
            )

    def _check_memory(self) -> None:
        if self.same_length and not self.memory_facts.keys_are_tokens:
            raise ValueError(
                f"same_length=true is not supported by memory={self.memory}, which attention does "
                "not see as one key per token; use false"
            )
        if self.same_length and self.mem_len == 0:
            raise ValueError("same_length=true needs a memory: set mem_len to at least 1")
        for name, neutral in (("mem_shares", ()), ("compressed_len", None)):
            value = getattr(self, name)
            if value != neutral and name not in self.memory_facts.settings:
                raise ValueError(
                    f"{name}={value} is not supported by memory={self.memory}; remove it"
                )
        self._check_memory_shares()

    def _check_memory_shares(self) -> None:
        shares = self.mem_shares
        if len(shares) > self.n_layer:
            raise ValueError(
                f"mem_shares has {len(shares)} entries for n_layer={self.n_layer}; give one per "
                "layer, or fewer that are repeated"
            )
        # Not by `mem_lens`: foreign configs may name any number of layers.
        if self.same_length and 0 in [round(self.mem_len * share) for share in shares]:
            raise ValueError(
                "same_length=true needs a memory in every layer: raise the smallest of mem_shares"
            )
        if any(not 0 <= share <= 1 for share in shares) or (shares and max(shares) < 1):
            raise ValueError(
                f"mem_shares={list(shares)} must be between 0 and 1, and the largest 1: mem_len is "
                "the length of the longest memory"
            )

    def _check_clusters(self) -> None:
        if self.vocab_size is None and (self.cutoffs or self.div_val > 1 or self.d_embed):
            raise ValueError(
                "vocab_size=null is a model of vectors, which has no tables for cutoffs, div_val "
                "or d_embed; remove them"
            )
        # vocab_size is 0 until the data is known; then only the order of cutoffs is checked.
        bounds = (0, *self.cutoffs, self.vocab_size or max(self.cutoffs, default=0) + 1)
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(
                f"cutoffs={list(self.cutoffs)} must increase from above 0 to below the vocabulary "
                f"size{f', {self.vocab_size}' if self.vocab_size else ''}; drop the entry out of "
                "order"
            )
        if self.div_val < 1 or (self.div_val > 1 and not self.cutoffs):
            raise ValueError(f"div_val={self.div_val} must be 1, or above 1 together with cutoffs")
        if self.table_widths[-1] < 1:
            raise ValueError(
                f"div_val={self.div_val} narrows width {self.embedding_width} to 0 in cluster "
                f"{len(self.cutoffs)}; lower div_val or set fewer cutoffs"
            )
        if len(self.tie_projs) > self.num_clusters:
            raise ValueError(
                f"tie_projs has {len(self.tie_projs)} entries; cutoffs={list(self.cutoffs)} make "
                f"{self.num_clusters} clusters, so at most that many are valid"
            )
        if any(self.tie_projs) and not self.has_projection:
            raise ValueError("tie_projs needs a d_embed that differs from d_model, or div_val > 1")

    @property
    def encoding(self) -> EncodingFacts:
        """Facts about the distance encoding."""
        return DISTANCE_ENCODINGS[self.distance_encoding]

    @property
    def memory_facts(self) -> MemoryFacts:
        """Facts about the kind of memory."""
        return MEMORY_KINDS[self.memory]

    @property
    def tokens_kept(self) -> int:
        """`mem_len`, or 0 for a kind of memory without layer inputs of tokens."""
        return self.mem_len if self.memory_facts.uses_mem_len else 0

    @property
    def num_added_tokens(self) -> int:
        """Tokens that the memory adds to a segment of each lane."""
        return 2 * self.memory_tokens if self.memory_facts.adds_tokens else 0

    @property
    def has_memory(self) -> bool:
        """Whether a lane carries anything from segment to segment."""
        facts = self.memory_facts
        return facts.adds_tokens or not facts.uses_mem_len or self.mem_len > 0

    def with_mem_len(self, mem_len: int | None) -> Self:
        """With another `mem_len`, if it is not None. Raises ValueError if it has no effect."""
        if mem_len is None:
            return self
        if not self.memory_facts.uses_mem_len:
            raise ValueError(
                f"mem_len={mem_len} has no effect on a model with memory={self.memory}, which "
                "keeps no tokens; omit the option"
            )
        return replace(self, mem_len=mem_len, same_length=self.same_length and mem_len > 0)

    @property
    def shares_biases(self) -> bool:
        """Whether all layers share one pair of position biases u and v."""
        return self.encoding.has_position_biases and not self.untie_r

    @property
    def num_ids(self) -> int:
        """Token ids of the vocabulary; 0 if it is not known yet, or for a model of vectors."""
        return self.vocab_size or 0

    @property
    def mem_lens(self) -> tuple[int, ...]:
        """Memory length of each layer."""
        lens = [round(self.mem_len * share) for share in self.mem_shares or (1.0,)]
        return tuple(lens[layer % len(lens)] for layer in range(self.n_layer))

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def num_clusters(self) -> int:
        """Clusters of the vocabulary, including the shortlist of frequent tokens."""
        return len(self.cutoffs) + 1

    @property
    def cluster_bounds(self) -> tuple[tuple[int, int], ...]:
        """Token ids [start, stop) of each cluster."""
        return tuple(pairwise((0, *self.cutoffs, self.num_ids)))

    @property
    def table_bounds(self) -> tuple[tuple[int, int], ...]:
        """Token ids [start, stop) of each embedding table: one per cluster if `div_val` > 1."""
        return self.cluster_bounds if self.div_val > 1 else ((0, self.num_ids),)

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Width of each embedding table."""
        width = self.embedding_width
        if self.div_val == 1:
            return (width,)
        return tuple(width // self.div_val**cluster for cluster in range(self.num_clusters))

    def is_tied(self, cluster: int) -> bool:
        """Whether embedding and softmax share the projection of this cluster."""
        return cluster < len(self.tie_projs) and self.tie_projs[cluster]

    @property
    def embedding_width(self) -> int:
        return self.d_model if self.d_embed is None else self.d_embed

    @property
    def has_projection(self) -> bool:
        """Whether there are projections between embedding tables and `d_model`."""
        return self.div_val > 1 or self.embedding_width != self.d_model


_ROTARY_ONLY = {"rotary_base": 10000.0, "rotary_scaling": None}
"""Settings of the rotary encoding, and what they are for others."""
_MINIMUMS = {
    **dict.fromkeys(("n_layer", "d_model", "n_head", "n_kv_head", "d_head", "d_inner"), 1),
    "d_embed": 1,
    **dict.fromkeys(("vocab_size", "mem_len", "compressed_len"), 0),
    **{"memory_tokens": 1, "compression_rate": 2, "clamp_len": 1},
}
"""The smallest value of each number that has one, unless it is null."""


def _require_known(option: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"{option}={name!r} must be one of {', '.join(known)}")
