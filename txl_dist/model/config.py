"""The architecture of one Transformer-XL, as frozen data that checks itself once.

Names follow the paper's code (arXiv:1901.02860) where it has one. Imports nothing of the project,
so a model can be rebuilt from this file's dataclass and a state dict alone.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that decides the parameters and the function of a model."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    vocab_size: int = 0
    """Number of token ids. 0 in a run's YAML means: the data's vocabulary."""
    n_layer: int = 4
    d_model: int = 128
    n_head: int = 4
    d_head: int = 32
    d_inner: int = 512
    d_embed: int | None = None
    """Width of the token table; None is `d_model`. Another width adds a projection at each end."""
    mem_len: int = 128
    """Tokens of memory per lane and layer. 0 turns recurrence off."""
    distance_encoding: Literal["sinusoidal", "shaw", "rotary", "alibi", "absolute"] = "sinusoidal"
    """What attention knows of distances; `sinusoidal` is the paper's (encodings.py)."""
    clamp_len: int | None = None
    """Distances above this share one encoding; None never clamps."""
    same_length: bool = False
    """Let every query see exactly `mem_len` keys, its own included."""
    tie_weight: bool = True
    """Share the token table with the softmax (the biases stay its own)."""
    cutoffs: tuple[int, ...] = ()
    """Token ids where the adaptive softmax opens its next, cheaper cluster; () is plain softmax."""
    div_val: int = 1
    """Cluster i has a token table `div_val ** i` times narrower; 1 is one table for all."""
    tie_projs: tuple[bool, ...] = ()
    """Per cluster: share the projection between `d_model` and the table's width at both ends."""
    untie_r: bool = False
    """Give every layer position biases u and v of its own, instead of one pair for all."""
    pre_lnorm: bool = False
    """Normalise before each sublayer instead of after it."""
    dropout: float = 0.0
    dropatt: float = 0.0
    """Dropout of attention weights."""
    attention: Literal["auto", "reference", "fused", "biased"] = "auto"
    """Which form of the same equation; `reference` is the readable oracle, `auto` the fastest."""
    init_std: float = 0.02
    proj_init_std: float = 0.01

    def __post_init__(self) -> None:
        for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("vocab_size", "mem_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("dropout", "dropatt"):
            if not 0 <= getattr(self, name) <= 0.99:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 0.99]")
        if self.d_embed is not None and self.d_embed < 1:
            raise ValueError(f"d_embed={self.d_embed} must be at least 1, or null for d_model")
        if self.clamp_len is not None and self.clamp_len < 1:
            raise ValueError(
                f"clamp_len={self.clamp_len} must be at least 1, or null to switch it off"
            )
        self._check_encoding()
        if self.same_length and self.mem_len == 0:
            raise ValueError("same_length=true needs a memory: set mem_len to at least 1")
        self._check_clusters()

    def _check_encoding(self) -> None:
        name = self.distance_encoding
        if self.d_model % 2 and name in ("sinusoidal", "absolute"):
            raise ValueError(
                f"d_model={self.d_model} must be even: distances are encoded as pairs of sine and "
                f"cosine; use {self.d_model + 1}"
            )
        if self.d_head % 2 and name == "rotary":
            raise ValueError(
                f"d_head={self.d_head} must be even for distance_encoding=rotary, which turns "
                f"pairs; use {self.d_head + 1}"
            )
        if self.clamp_len is None and name == "shaw":
            raise ValueError(
                "distance_encoding=shaw learns a vector for every distance up to clamp_len; set "
                "clamp_len, for example to mem_len + tgt_len - 1"
            )
        if self.clamp_len is not None and name == "rotary":
            raise ValueError(
                f"clamp_len={self.clamp_len} cannot be had with distance_encoding=rotary, which "
                "turns by positions; use null"
            )
        if self.mem_len and name == "absolute":
            raise ValueError(
                f"mem_len={self.mem_len} cannot be had with distance_encoding=absolute, which "
                "knows the place in a segment only; use 0, or another distance_encoding"
            )
        if self.untie_r and name != "sinusoidal":
            raise ValueError(
                f"untie_r=true is an option of distance_encoding=sinusoidal, not of {name}; "
                "use false"
            )

    def _check_clusters(self) -> None:
        bounds = (0, *self.cutoffs, self.vocab_size or max(self.cutoffs, default=0) + 1)
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(
                f"cutoffs={list(self.cutoffs)} must rise from above 0 to below the vocabulary's "
                f"size{f', {self.vocab_size}' if self.vocab_size else ''}; drop the entry out of "
                "order"
            )
        if self.div_val < 1 or (self.div_val > 1 and not self.cutoffs):
            raise ValueError(
                f"div_val={self.div_val} must be 1, or more than 1 with cutoffs to narrow at"
            )
        if self.table_widths[-1] < 1:
            raise ValueError(
                f"div_val={self.div_val} narrows {self.embedding_width} to nothing in cluster "
                f"{len(self.cutoffs)}; lower div_val or give fewer cutoffs"
            )
        if len(self.tie_projs) > self.num_clusters:
            raise ValueError(
                f"tie_projs has {len(self.tie_projs)} entries; cutoffs={list(self.cutoffs)} make "
                f"{self.num_clusters} clusters, so at most that many are legal"
            )
        if any(self.tie_projs) and not self.has_projection:
            raise ValueError("tie_projs needs a d_embed that differs from d_model, or div_val > 1")

    @property
    def shares_biases(self) -> bool:
        """Whether one pair u, v serves all layers."""
        return self.distance_encoding == "sinusoidal" and not self.untie_r

    @property
    def num_clusters(self) -> int:
        """Clusters of the vocabulary, the shortlist of frequent tokens included."""
        return len(self.cutoffs) + 1

    @property
    def cluster_bounds(self) -> tuple[tuple[int, int], ...]:
        """Token ids [start, stop) of every cluster."""
        return tuple(pairwise((0, *self.cutoffs, self.vocab_size)))

    @property
    def table_bounds(self) -> tuple[tuple[int, int], ...]:
        """Token ids [start, stop) of every token table: one a cluster if they differ in width."""
        return self.cluster_bounds if self.div_val > 1 else ((0, self.vocab_size),)

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Width of every token table."""
        width = self.embedding_width
        if self.div_val == 1:
            return (width,)
        return tuple(width // self.div_val**cluster for cluster in range(self.num_clusters))

    def is_tied(self, cluster: int) -> bool:
        """Whether a cluster's projection is shared between input and output."""
        return cluster < len(self.tie_projs) and self.tie_projs[cluster]

    @property
    def embedding_width(self) -> int:
        return self.d_model if self.d_embed is None else self.d_embed

    @property
    def has_projection(self) -> bool:
        """Whether tables pass a projection: always if they differ in width."""
        return self.div_val > 1 or self.embedding_width != self.d_model
