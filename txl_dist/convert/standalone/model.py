"""The model of the standalone file: layers, distances, vocabulary and the paper's memory.

See the docstring of this package. Nothing of txl_dist may be used in here.
"""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Shapes: B rows, T tokens of a segment, M keys of the memory, S = M + T keys, D d_model, H heads,
# K d_head, V vocabulary

Memory = dict[str, Tensor]


class Weights(dict[str, Tensor]):
    """Tensors by name. `linear` and `norm` use those of a module of this name."""

    def below(self, name: str) -> "Weights":
        """Those whose names begin with NAME., without that."""
        start = f"{name}."
        return Weights({k.removeprefix(start): x for k, x in self.items() if k.startswith(start)})

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """LayerNorm, or RMS norm, which has no weights."""
        if (weight := self.get(f"{name}.weight")) is None:
            return rms_norm(x)
        return functional.layer_norm(x, weight.shape, weight, self[f"{name}.bias"])


# --- a layer --------------------------------------------------------------------------------------


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6), in fp32 at least (arXiv:1910.07467)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def layer(c: Any, w: Weights, x: Tensor, memory: Tensor, mask_BTS: Tensor, biases: Any) -> Tensor:
    """Attention and feed-forward, each with a residual, and a norm before (pre) or after it."""

    def sublayer(name: str, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        y = function(w.norm(f"{name}_norm", x) if c.pre_lnorm else x)
        x = x + y if c.residual_gate == "none" else gru_gate(w.below(f"{name}_gate"), x, y)
        return x if c.pre_lnorm else w.norm(f"{name}_norm", x)

    if c.pre_lnorm:
        memory = w.norm("attention_norm", memory)
    within = w.below("attention"), w.below("feed_forward")
    x = sublayer("attention", x, lambda x: attention(c, within[0], x, memory, mask_BTS, biases))
    return sublayer("feed_forward", x, lambda x: feed_forward(c, within[1], x))


def feed_forward(c: Any, w: Weights, x: Tensor) -> Tensor:
    """down(f(up(x))), where f is relu, relu2 (its square), or swiglu: silu(a) b of [a ; b]."""
    x = w.linear("up", x)
    if c.feed_forward == "swiglu":
        gate, value = x.chunk(2, dim=-1)
        return w.linear("down", functional.silu(gate) * value)
    return w.linear("down", x.relu().square() if c.feed_forward == "relu2" else x.relu())


def gru_gate(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    """GTrXL's gated unit in place of x + y (arXiv:1910.06764, section 3.2)."""
    w_r, w_z, w_h = w.linear("from_output", y.relu()).chunk(3, dim=-1)
    u_r, u_z = w.linear("from_input", x).chunk(2, dim=-1)
    reset, update = (w_r + u_r).sigmoid(), (w_z + u_z - w["update_bias"]).sigmoid()
    return torch.lerp(x, (w_h + w.linear("from_reset", reset * x)).tanh(), update)


def attention(c: Any, w: Weights, x: Tensor, memory: Tensor, mask: Tensor, biases: Any) -> Tensor:
    """A segment [B, T, D] over memory [B, M, D] and segment, where `mask` [B, T, S] is false.

    score = (q + u) . k + (q + v) . r + b. Of the distance of a key depend: r, a projection of sines
    and cosines (`sinusoidal`, the paper's); r and b, learned (`shaw`, arXiv:1803.02155); or b,
    falling with a slope per head (`alibi`, arXiv:2108.12409).
    """
    context_BSD, heads = torch.cat([memory, x], dim=1), (c.n_head, c.d_head)
    num_queries, num_keys = mask.shape[1:]
    q = w.linear("query", x).unflatten(-1, heads)  # [B, T, H, K]
    k, v = w.linear("key_value", context_BSD).unflatten(-1, (2, *heads)).unbind(2)
    if c.qk_norm:
        q, k = rms_norm(q), rms_norm(k)
    if c.attention_scale is not None:  # in place of 1 / sqrt(K), which follows
        q = q * (c.attention_scale * c.d_head ** (-0.5 if c.qk_norm else 0.5))
    if c.distance_encoding == "rotary":
        q, k = rotate(q, num_keys), rotate(k, num_keys)
    distance_S = distances(num_keys, x, c.clamp_len)
    q_r, r_SHK, by_distance = q, None, torch.zeros((), dtype=x.dtype, device=x.device)
    if c.distance_encoding == "sinusoidal":
        own = w.below("distances")
        u_HK, v_HK = biases or (own["content_bias_HK"], own["distance_bias_HK"])
        r = own.linear("project", sinusoids(distance_S, c.d_model).to(x.dtype))
        q, q_r, r_SHK = q + u_HK, q + v_HK, r.unflatten(-1, heads)
    elif c.distance_encoding == "shaw":
        own, row_S = w.below("distances"), distance_S.long()
        q, r_SHK = q + own["content_bias_HK"], own["distance_SHK"][row_S]
        by_distance = own["score_SH"][row_S].t()[:, None]  # b, scaled as the other terms
    elif c.distance_encoding == "alibi":
        head_H = torch.arange(1, c.n_head + 1, dtype=torch.float64, device=x.device)
        slope_H = 2.0 ** (-8.0 * head_H / c.n_head) * c.d_head**0.5
        by_distance = (-slope_H[:, None] * distance_S).to(x.dtype)[:, None]
    if r_SHK is not None:
        by_distance = by_distance + torch.einsum("bthk,shk->bhts", q_r, r_SHK)
    shape = (len(x), c.n_head, num_queries, num_keys)
    score = torch.einsum("bthk,bshk->bhts", q, k) + align(by_distance.expand(shape))
    score = (score * c.d_head**-0.5).masked_fill(mask[:, None], -torch.inf)
    mixed = torch.einsum("bhts,bshk->bthk", score.softmax(dim=-1), v)
    if c.output_gate:  # of each head; 2 sigmoid is 1 at 0
        mixed = mixed * (2 * w.linear("gate", x).sigmoid())[..., None]
    return w.linear("out", mixed.flatten(-2))


def distances(num_keys: int, like: Tensor, clamp_len: int | None = None) -> Tensor:
    """S - 1, ..., 1, 0 in fp64, because angles of large distances are inaccurate in fp32."""
    distance_S = torch.arange(num_keys - 1, -1, -1, dtype=torch.float64, device=like.device)
    return distance_S if clamp_len is None else distance_S.clamp(max=clamp_len)


def sinusoids(distance_S: Tensor, width: int) -> Tensor:
    """Sines, then cosines: [S, width]."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=distance_S.device) / width
    angle = distance_S[:, None] * 10000.0**-exponent
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def align(by_distance: Tensor) -> Tensor:
    """The relative shift: scores [..., T, S] by distance become scores by key."""
    num_queries, num_keys = by_distance.shape[-2:]
    flat = functional.pad(by_distance, (1, 0)).flatten(-2)[..., num_queries:]
    return flat.unflatten(-1, (num_queries, num_keys))


def rotate(x_BNHK: Tensor, num_keys: int) -> Tensor:
    """Rotary positions (arXiv:2104.09864) of the last N of S = `num_keys`."""
    position_N = -distances(num_keys, x_BNHK)[-x_BNHK.shape[1] :]
    table_N1K = sinusoids(position_N, x_BNHK.shape[-1]).to(x_BNHK.dtype)[:, None]
    (sin, cos), (x, y) = table_N1K.chunk(2, dim=-1), x_BNHK.chunk(2, dim=-1)
    return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)


# --- the memory -----------------------------------------------------------------------------------


class Recurrent:
    """`recurrent`: every layer keeps its inputs for the last tokens, without gradient."""

    num_added = 0
    """Tokens that are added to a segment."""

    def __init__(self, c: Any, w: Weights) -> None:
        self.c, self.w, shares = c, w, c.mem_shares or [1.0]
        self.mem_lens = [round(c.mem_len * shares[n % len(shares)]) for n in range(c.n_layer)]

    def empty(self, num_rows: int, like: Tensor) -> Memory:
        """Rows at the start of documents, with the dtype and device of `like`."""
        memory = {"age": like.new_zeros(num_rows, dtype=torch.int64)}
        for n, mem_len in enumerate(self.mem_lens):
            memory[f"layer-{n}"] = like.new_zeros(num_rows, mem_len, self.c.d_model)
        return memory

    def add_tokens(self, x: Tensor, age_BT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """The segment [B, T, D] and its ages with the added tokens, if any."""
        return x, age_BT

    def remove_tokens(self, x: Tensor) -> Tensor:
        return x

    def past(self, n: int, memory: Memory) -> Tensor:
        """The inputs [B, M, D] of layer n before the segment."""
        return memory[f"layer-{n}"]

    def reach(self, age_BT: Tensor, memory: Memory) -> Tensor:
        """How many keys before itself a token sees. Its age: every key is a token."""
        return age_BT

    def after(self, memory: Memory, hidden: list[Tensor], age_BT: Tensor) -> Memory:
        """The memory after a segment. `hidden`: the inputs of the layers, and the last output."""
        new = {"age": age_BT[:, -1] + 1}
        for n, mem_len in enumerate(self.mem_lens):
            rows_BND = torch.cat([memory[f"layer-{n}"], hidden[n]], dim=1)
            # A copy: a view would keep the whole segment.
            new[f"layer-{n}"] = rows_BND[:, rows_BND.shape[1] - mem_len :].clone()
        return new


KINDS: dict[str, type[Recurrent]] = {"recurrent": Recurrent}
"""By `model.memory` of config.json."""


# --- the model ------------------------------------------------------------------------------------


class TransformerXL:
    """model(ids_BT, memory, starts_BT) -> (logits_BTV, memory after the segment)."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], segment_len: int
    ) -> None:
        self.c, self.w, self.segment_len = SimpleNamespace(**config), Weights(tensors), segment_len
        self.kind = KINDS[self.c.memory](self.c, self.w)
        self.like = self.w["layers.0.attention.query.weight"]  # of the dtype and device of all

    def empty_memory(self, num_rows: int) -> Memory:
        """The memory of rows at the start of documents."""
        return self.kind.empty(num_rows, self.like)

    def __call__(
        self, ids_BT: Tensor, memory: Memory | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Read a segment. `memory`: None at the start of documents. `starts_BT`: booleans.

        Logits are fp32 at least; those of an adaptive softmax are log-probabilities.
        """
        c, w, kind = self.c, self.w, self.kind
        memory = self.empty_memory(len(ids_BT)) if memory is None else memory
        # The age of a token is its distance to the start of its document: it sees no further back.
        position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        age_BT = memory["age"][:, None] + position_T
        if starts_BT is not None:
            start_BT = torch.where(starts_BT, position_T, -1).cummax(1).values
            age_BT = torch.where(start_BT >= 0, position_T - start_BT, age_BT)
        x, read_age_BT = kind.add_tokens(self.embed(ids_BT), age_BT, memory)
        reach_BT, first, hidden = kind.reach(read_age_BT, memory), x, []
        biases = None
        if c.distance_encoding == "sinusoidal" and not c.untie_r:  # shared by all layers
            biases = w["content_bias_HK"], w["distance_bias_HK"]
        for n in range(c.n_layer):
            if c.residual_scalars:
                a, b = w["residual_scalars"][n]
                x = a * x + b * first
            hidden.append(x)
            past_BMD = kind.past(n, memory)
            mask_BTS = self.mask(reach_BT, past_BMD.shape[1])
            x = layer(c, w.below(f"layers.{n}"), x, past_BMD, mask_BTS, biases)
        with torch.no_grad():
            after = kind.after(memory, [*hidden, x], age_BT)
        x = kind.remove_tokens(x)
        return self.logits(w.norm("final_norm", x) if c.final_norm else x), after

    def mask(self, reach_BT: Tensor, num_past: int) -> Tensor:
        """True where a query may not see a key, [B, T, S]."""
        position_S = torch.arange(num_past + reach_BT.shape[1], device=reach_BT.device)
        distance_TS = position_S[num_past:, None] - position_S
        mask_BTS = (distance_TS < 0) | (distance_TS > reach_BT[..., None])
        return mask_BTS | (distance_TS >= num_past) if self.c.same_length else mask_BTS

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Vectors [B, T, D]. With `div_val`, rarer ids have narrower ones (arXiv:1809.10853)."""
        c, w = self.c, self.w.below("table")
        x = self.like.new_zeros(*ids_BT.shape, c.d_model)
        bounds = [0, *(c.cutoffs if c.div_val > 1 else []), c.vocab_size]
        for table, (start, stop) in enumerate(pairwise(bounds)):
            inside_BT = (ids_BT >= start) & (ids_BT < stop)
            rows = functional.embedding(ids_BT[inside_BT] - start, w[f"weights.{table}"])
            if (projection := w.get(f"projections.{table}")) is not None:
                rows = functional.linear(rows, projection)
            x = x.masked_scatter(inside_BT[..., None], rows)
        x = x * c.d_model**0.5
        if c.distance_encoding == "absolute":
            x = x + sinusoids(distances(x.shape[1], x, c.clamp_len), c.d_model).to(x.dtype)
        return x

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Logits [B, T, V]. With `cutoffs`: a head of the frequent ids and a column per cluster of
        others, whose softmax divides the probability of that column (arXiv:1609.04309)."""
        c, w, table = self.c, self.w.below("softmax"), self.w.below("table")
        sizes = [stop - start for start, stop in pairwise([0, *c.cutoffs, c.vocab_size])]
        num_tables = len(sizes) if c.div_val > 1 else 1
        own = table if c.tie_weight else w
        weights = [own[f"weights.{number}"] for number in range(num_tables)]
        weights = weights if num_tables == len(sizes) else [*weights[0].split(sizes)]
        bias_V = w["bias"] if c.biases else self.like.new_zeros(c.vocab_size)
        scores = []
        biases = [*bias_V.split(sizes)]
        if c.cutoffs:
            more = w["cluster_bias"] if c.biases else bias_V.new_zeros(len(c.cutoffs))
            weights[0] = torch.cat([weights[0], w["cluster_weight"]])
            biases[0] = torch.cat([biases[0], more])
        for cluster, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            projection = w.get(f"projections.{cluster}")
            if projection is None:  # that of the table, or none
                projection = table.get(f"projections.{min(cluster, num_tables - 1)}")
            x = x_BTD if projection is None else x_BTD @ projection
            score = functional.linear(x, weight, bias)
            score = score.to(torch.promote_types(score.dtype, torch.float32))
            scores.append(score.log_softmax(-1) if c.cutoffs else score)
        head, *tails = scores
        parts = [tail + head[..., [sizes[0] + n]] for n, tail in enumerate(tails)]
        return torch.cat([head[..., : sizes[0]], *parts], dim=-1)
