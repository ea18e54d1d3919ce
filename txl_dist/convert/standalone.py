"""A Transformer-XL in one file: model, memory, tokenizer and generation. Needs torch.

    model, tokenizer = load("DIRECTORY")
    print(generate(model, tokenizer, "Once upon a time", max_tokens=100))

    memory = model.empty_memory(num_rows=1)
    for ids_BT in segments:                            # int64 [rows, tokens]
        logits_BTV, memory = model(ids_BT, memory)     # of the next tokens, [rows, tokens, ids]

From a shell: python transformer_xl.py --prompt "Once upon a time"

The memory is a dict of tensors, rows first: what the model keeps of earlier tokens, and the age of
each row. It is an argument and a result, and never changed in place. Documents may begin anywhere:
`starts_BT` is true at their first tokens, and no token sees one of another document. The model
computes as in its training if its segments have `model.segment_len` tokens.

The model is written as its equations are, without dropout, cache or kernels. To train it, set
`requires_grad_()` on `model.w.values()`; gradients stop at the memory. Source: Dai et al.
2019, arXiv:1901.02860, and those of each part. Written by txl-dist; this file is Apache-2.0.
"""

import argparse
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
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

    def norm(self, name: str, x: Tensor, epsilon: float) -> Tensor:
        """LayerNorm, or RMS norm, which has no bias."""
        weight, bias = self[f"{name}.weight"], self.get(f"{name}.bias")
        if bias is None:
            return rms_norm(x, weight, epsilon)
        return functional.layer_norm(x, weight.shape, weight, bias, epsilon)


# --- a layer --------------------------------------------------------------------------------------


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """g x / sqrt(mean(x^2) + epsilon), in fp32 at least (arXiv:1910.07467)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * gain).to(x.dtype)


def layer(c: Any, w: Weights, x: Tensor, memory: Tensor, mask_BTS: Tensor, biases: Any) -> Tensor:
    """Attention and feed-forward, each with a residual, and a norm before (pre) or after it."""

    def sublayer(name: str, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        y = function(w.norm(f"{name}_norm", x, c.norm_epsilon) if c.pre_lnorm else x)
        return x + y if c.pre_lnorm else w.norm(f"{name}_norm", x + y, c.norm_epsilon)

    if c.pre_lnorm:
        memory = w.norm("attention_norm", memory, c.norm_epsilon)
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


def attention(c: Any, w: Weights, x: Tensor, memory: Tensor, mask: Tensor, biases: Any) -> Tensor:
    """A segment [B, T, D] over memory [B, M, D] and segment, where `mask` [B, T, S] is false.

    score = (q + u) . k + (q + v) . r + b. Of the distance of a key depend: r, a projection of sines
    and cosines (`sinusoidal`, the paper's); r and b, learned (`shaw`, arXiv:1803.02155); or b,
    falling with a slope per head (`alibi`, arXiv:2108.12409).
    """
    context_BSD, heads = torch.cat([memory, x], dim=1), (c.n_head, c.d_head)
    num_queries, num_keys = mask.shape[1:]
    q = w.linear("query", x).unflatten(-1, heads)  # [B, T, H, K]
    kv_heads = (c.n_kv_head or c.n_head, c.d_head)
    k, v = w.linear("key_value", context_BSD).unflatten(-1, (2, *kv_heads)).unbind(2)
    if c.qk_norm:
        q = rms_norm(q, w["query_gain_K"], c.norm_epsilon)
        k = rms_norm(k, w["key_gain_K"], c.norm_epsilon)
    if c.distance_encoding == "rotary":
        q, k = rotate(c, q, num_keys), rotate(c, k, num_keys)
    # Each head of keys and values serves equally many heads of queries (arXiv:2305.13245).
    k, v = (y.repeat_interleave(c.n_head // y.shape[2], dim=2) for y in (k, v))
    distance_S = distances(num_keys, x, c.clamp_len)
    q_r, r_SHK, by_distance = q, None, torch.zeros((), dtype=x.dtype, device=x.device)
    if c.distance_encoding == "sinusoidal":
        own = w.below("distances")
        u_HK, v_HK = biases or (own["content_bias_HK"], own["distance_bias_HK"])
        r = own.linear("project", sinusoids(distance_S, frequencies(c.d_model, x)).to(x.dtype))
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
    return w.linear("out", mixed.flatten(-2))


def distances(num_keys: int, like: Tensor, clamp_len: int | None = None) -> Tensor:
    """S - 1, ..., 1, 0 in fp64, because angles of large distances are inaccurate in fp32."""
    distance_S = torch.arange(num_keys - 1, -1, -1, dtype=torch.float64, device=like.device)
    return distance_S if clamp_len is None else distance_S.clamp(max=clamp_len)


def frequencies(width: int, like: Tensor, base: float = 10000.0) -> Tensor:
    """Angles per token of `width / 2` planes, the fastest first."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width
    return base**-exponent


def sinusoids(distance_S: Tensor, frequency: Tensor) -> Tensor:
    """Sines, then cosines: [S, width]."""
    angle = distance_S[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def align(by_distance: Tensor) -> Tensor:
    """The relative shift: scores [..., T, S] by distance become scores by key."""
    num_queries, num_keys = by_distance.shape[-2:]
    flat = functional.pad(by_distance, (1, 0)).flatten(-2)[..., num_queries:]
    return flat.unflatten(-1, (num_queries, num_keys))


def rotate(c: Any, x_BNHK: Tensor, num_keys: int) -> Tensor:
    """Rotary positions (arXiv:2104.09864) of the last N of S = `num_keys`."""
    position_N = -distances(num_keys, x_BNHK)[-x_BNHK.shape[1] :]
    frequency = frequencies(c.d_head, x_BNHK, c.rotary_base)
    if (scaling := c.rotary_scaling) is not None:  # arXiv:2306.15595, and that of Llama 3.1
        turns = scaling["original_len"] * frequency / (2 * math.pi)
        low, high = scaling["low_turns"], scaling["high_turns"]
        share = ((turns - low) / (high - low)).clamp(0, 1) * (scaling["kind"] == "llama3")
        frequency = torch.lerp(frequency / scaling["factor"], frequency, share)
    table_N1K = sinusoids(position_N, frequency).to(x_BNHK.dtype)[:, None]
    (sin, cos), (x, y) = table_N1K.chunk(2, dim=-1), x_BNHK.chunk(2, dim=-1)
    return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)


# --- the model ------------------------------------------------------------------------------------


class TransformerXL:
    """model(ids_BT, memory, starts_BT) -> (logits_BTV, memory after the segment)."""

    def __init__(self, config: dict[str, Any], weights: Weights, segment_len: int) -> None:
        self.c, self.w, self.segment_len = SimpleNamespace(**config), weights, segment_len
        self.like = self.w["layers.0.attention.query.weight"]  # of the dtype and device of all
        c, shares = self.c, self.c.mem_shares or [1.0]
        mem_len = 0 if c.memory == "tokens" else c.mem_len
        self.mem_lens = [round(mem_len * shares[n % len(shares)]) for n in range(c.n_layer)]
        self.num_added = c.memory_tokens if "tokens" in c.memory else 0

    def empty_memory(self, num_rows: int) -> Memory:
        """The memory of rows at the start of documents."""
        memory = {"age": self.like.new_zeros(num_rows, dtype=torch.int64)}
        for n, mem_len in enumerate(self.mem_lens):
            memory[f"layer-{n}"] = self.like.new_zeros(num_rows, mem_len, self.c.d_model)
        if self.num_added:
            tokens_BmD = self.like.new_zeros(num_rows, self.num_added, self.c.d_model)
            memory["tokens"] = tokens_BmD.to(torch.promote_types(tokens_BmD.dtype, torch.float32))
        return memory

    def __call__(
        self, ids_BT: Tensor, memory: Memory | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Read a segment. `memory`: None at the start of documents. `starts_BT`: booleans.

        Logits are fp32 at least; those of an adaptive softmax are log-probabilities.
        """
        c, w, num_added = self.c, self.w, self.num_added
        memory = self.empty_memory(len(ids_BT)) if memory is None else memory
        # The age of a token is its distance to the start of its document: it sees no further back.
        position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        age_BT = memory["age"][:, None] + position_T
        if starts_BT is not None:
            start_BT = torch.where(starts_BT, position_T, -1).cummax(1).values
            age_BT = torch.where(start_BT >= 0, position_T - start_BT, age_BT)
        x, seen_BT = self.embed(ids_BT), age_BT
        if num_added:
            x, seen_BT = self.add_tokens(x, age_BT, memory["tokens"])
        hidden, biases = [], None
        mask_of = {mem_len: self.mask(seen_BT, mem_len) for mem_len in self.mem_lens}
        if c.distance_encoding == "sinusoidal" and not c.untie_r:  # shared by all layers
            biases = w["content_bias_HK"], w["distance_bias_HK"]
        for n in range(c.n_layer):
            hidden.append(x)
            past_BMD, mask_BTS = memory[f"layer-{n}"], mask_of[self.mem_lens[n]]
            x = layer(c, w.below(f"layers.{n}"), x, past_BMD, mask_BTS, biases)
        after = {"age": age_BT[:, -1] + 1}
        if num_added:
            after["tokens"] = x[:, -num_added:].detach().to(memory["tokens"].dtype, copy=True)
        own = slice(num_added, x.shape[1] - num_added)
        for n, mem_len in enumerate(self.mem_lens):
            rows_BND = torch.cat([memory[f"layer-{n}"], hidden[n][:, own].detach()], dim=1)
            # A copy: a view would keep the whole segment.
            after[f"layer-{n}"] = rows_BND[:, rows_BND.shape[1] - mem_len :].clone()
        x = x[:, own]
        return self.logits(w.norm("final_norm", x, c.norm_epsilon) if c.final_norm else x), after

    def add_tokens(self, x: Tensor, age_BT: Tensor, tokens_BmD: Tensor) -> tuple[Tensor, Tensor]:
        """The segment [B, T, D] between tokens that read and tokens that write, and all ages.

        m tokens in front of a segment read what m tokens after the one before wrote
        (arXiv:2207.06881). A token sees them if its document began before the segment.
        """
        m, w = self.num_added, self.w.below("added_tokens")
        read_BmD = tokens_BmD.to(x.dtype)
        is_old_BT = age_BT > torch.arange(age_BT.shape[1], device=age_BT.device)
        if self.c.pre_lnorm:
            read_BmD = w.norm("norm", read_BmD, self.c.norm_epsilon)
        write_BmD = torch.where(is_old_BT[:, -1:, None], read_BmD, w["initial_mD"])
        slot_m = torch.arange(m, device=x.device)
        read_age_Bm, age_BT = age_BT[:, :1] + slot_m, age_BT + m * is_old_BT
        ages = [read_age_Bm, age_BT, age_BT[:, -1:] + 1 + slot_m]
        return torch.cat([read_BmD, x, write_BmD], dim=1), torch.cat(ages, dim=1)

    def mask(self, seen_BT: Tensor, num_past: int) -> Tensor:
        """True where a query may not see a key, [B, T, S]. It sees `seen_BT` keys before itself."""
        position_S = torch.arange(num_past + seen_BT.shape[1], device=seen_BT.device)
        distance_TS = position_S[num_past:, None] - position_S
        mask_BTS = (distance_TS < 0) | (distance_TS > seen_BT[..., None])
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
        x = x * c.d_model**0.5 if c.scale_embedding else x
        if c.distance_encoding == "absolute":
            distance_T, frequency = distances(x.shape[1], x, c.clamp_len), frequencies(c.d_model, x)
            x = x + sinusoids(distance_T, frequency).to(x.dtype)
        return x

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Logits [B, T, V]. With `cutoffs`: a head of the frequent ids and a column per cluster of
        others, whose softmax divides the probability of that column (arXiv:1609.04309)."""
        c, w, table = self.c, self.w.below("softmax"), self.w.below("table")
        sizes = [stop - start for start, stop in pairwise([0, *c.cutoffs, c.vocab_size])]
        num_tables, own = len(sizes) if c.div_val > 1 else 1, table if c.tie_weight else w
        weights = [own[f"weights.{number}"] for number in range(num_tables)]
        weights = weights if num_tables == len(sizes) else [*weights[0].split(sizes)]
        bias_V = w["bias"] if c.biases else self.like.new_zeros(c.vocab_size)
        scores, biases = [], [*bias_V.split(sizes)]
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


# --- files ----------------------------------------------------------------------------------------


def load(
    directory: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> "tuple[TransformerXL, Tokenizer | None]":
    """The model, and its tokenizer if there is one. Raises ValueError for damaged files."""
    directory = Path(directory)
    content = json.loads((directory / "config.json").read_text("utf-8"))
    if (content.get("format"), content.get("version")) != ("txl-model", 1):
        raise ValueError(f"{directory / 'config.json'} is not that of a model of this file")
    tensors = read_safetensors(directory / "model.safetensors", content["weights_sha256"])
    moved = Weights({name: tensor.to(device, dtype) for name, tensor in tensors.items()})
    path = directory / "txl_tokenizer.json"
    tokenizer = Tokenizer(json.loads(path.read_text("utf-8"))) if path.exists() else None
    return TransformerXL(content["model"], moved, content["reading"]["tgt_len"]), tokenizer


def read_safetensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file: the length of its header, the header as JSON, then fp32 numbers."""
    raw = bytearray(path.read_bytes())
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        raise ValueError(f"{path} has sha256 {found}, config.json says {sha256}: it is damaged")
    start, tensors = 8 + int.from_bytes(raw[:8], "little"), {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            if entry["dtype"] != "F32":
                raise ValueError(f"{path}: {name} is {entry['dtype']}, expected F32")
            count, offset = math.prod(entry["shape"]), start + entry["data_offsets"][0]
            flat = torch.frombuffer(raw, dtype=torch.float32, count=count, offset=offset)
            tensors[name] = flat.view(entry["shape"])
    return tensors


# --- text -----------------------------------------------------------------------------------------


class Tokenizer:
    """Text to ids and back: bytes, characters, words, numbers, or the library `tokenizers`."""

    def __init__(self, content: dict[str, Any]) -> None:
        """`content`: that of txl_tokenizer.json."""
        self.kind, self.library = content["type"], None
        if "tokenizer" in content:
            from tokenizers import Tokenizer as Library  # pip install tokenizers

            self.library = Library.from_str(json.dumps(content["tokenizer"]))
        self.symbols = content.get("symbols") or content.get("names") or []
        self.id_of = {symbol: number for number, symbol in enumerate(self.symbols)}
        self.end: int = content.get("end_of_document", len(self.symbols))
        """The id of the end of documents, with which they also begin if `opens_documents`."""
        self.ends = {self.end, *content.get("ends_of_text", ())}
        """The ids at which a text ends."""
        self.opens_documents: bool = content.get("opens_documents", True)
        self.opens_lines = content.get("lines") == "both"

    def encode(self, text: str) -> list[int]:
        if self.library is not None:
            return list(self.library.encode(text, add_special_tokens=False).ids)
        if self.kind == "byte":
            return [*text.encode()]
        if self.kind == "char":
            return [self.id_of.get(character, self.id_of[""]) for character in text]
        if self.kind == "ids":
            return [self.id_of[name] if name in self.id_of else int(name) for name in text.split()]
        *lines, last = text.split("\n")
        begin = ["\n"] if self.opens_lines else []
        words = [word for line in lines for word in (*begin, *line.split(), "\n")]
        words += [*begin, *last.split()] if last.split() else []
        return [self.id_of.get(word, self.id_of["<unk>"]) for word in words]

    def decode(self, ids: list[int]) -> str:
        ids = [number for number in ids if number != self.end]
        if self.library is not None:
            return str(self.library.decode(ids, skip_special_tokens=False))
        if self.kind == "byte":
            return bytes(ids).decode("utf-8", errors="replace")
        if self.kind == "char":
            return "".join(self.symbols[number] or "\ufffd" for number in ids)
        if self.kind == "ids":
            return " ".join((self.symbols[n : n + 1] or [""])[0] or str(n) for n in ids)
        line_ends = r"( ?\n ?)+" if self.opens_lines else r" ?\n ?"
        text = re.sub(line_ends, "\n", " ".join(self.symbols[number] for number in ids))
        return text.lstrip("\n") if self.opens_lines else text


@torch.no_grad()
def generate_ids(
    model: TransformerXL, prompt: list[int], *, temperature: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Ids that follow the ids of a prompt, without end. Temperature 0: always the most likely."""
    c, device, size = model.c, model.like.device, model.segment_len
    has_memory = model.num_added > 0 or any(model.mem_lens)
    generator = torch.Generator().manual_seed(seed)
    memory, pending = model.empty_memory(1), [*prompt]
    while True:
        while has_memory and len(pending) > size:
            _, memory = model(torch.tensor([pending[:size]], device=device), memory)
            del pending[:size]
        pending = pending[-size:]
        # Absolute positions count from the end of a whole segment.
        padding = [0] * (size - len(pending)) if c.distance_encoding == "absolute" else []
        logits, after = model(torch.tensor([pending + padding], device=device), memory)
        logits_V = logits[0, len(pending) - 1].cpu()
        # What is written at the end of a segment needs the whole segment: read it again till then.
        reads_again = model.num_added > 0 or 0 in model.mem_lens
        if has_memory and (len(pending) == size or not reads_again):
            memory, pending = after, []
        pending.append(draw(logits_V, temperature, generator))
        yield pending[-1]


def draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """An id with the probability that softmax(logits / temperature) gives it."""
    if temperature == 0:
        return int(logits_V.argmax())
    scaled_V = (logits_V.double() - logits_V.max()) / temperature
    p_V = scaled_V.masked_fill(logits_V == -torch.inf, -torch.inf).softmax(0)
    return int((p_V / torch.empty_like(p_V).exponential_(generator=generator)).argmax())


def generate(
    model: TransformerXL,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int = 256,
    **sampling: Any,
) -> str:
    """The continuation of a prompt that begins a document; `sampling` as in `generate_ids`."""
    start = [tokenizer.end] if tokenizer.opens_documents else []
    ids, new = [*start, *tokenizer.encode(prompt)], []
    if not ids:
        raise ValueError("the prompt has no tokens, and no token begins documents: give a text")
    for number in islice(generate_ids(model, ids, **sampling), max_tokens):
        if number in tokenizer.ends:
            break
        new.append(number)
    return tokenizer.decode(ids + new).removeprefix(tokenizer.decode(ids))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Continue a text with the model of this folder.")
    for flag, value in (("prompt", ""), ("max-tokens", 256), ("temperature", 1.0), ("seed", 0)):
        parser.add_argument(f"--{flag}", type=type(value), default=value)
    options = vars(parser.parse_args())
    loaded, its_tokenizer = load(Path(__file__).parent)
    assert its_tokenizer, "there is no tokenizer.json next to this file"
    print(options["prompt"] + generate(loaded, its_tokenizer, **options))
