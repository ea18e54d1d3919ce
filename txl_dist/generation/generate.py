"""Generation from Python: the tokens of one prompt as an iterator, or the texts of many prompts.

for text in generate_texts(model, tokenizer, ["Once", "def f("], tgt_len=128,
                           sampling=Sampling(), limits=TextLimits(max_tokens=50), seed=0):
    print(text.text)

Prompts begin documents, as `prompt_tokens` encodes them. A warning names the symbols of prompts
that the vocabulary does not have.

`BatchDecoder` draws tokens for a batch of prompts of different lengths, with one KV cache:

    prompts -> read in segments of `tgt_len`, as in training -> one token per lane and call

Each prompt is a lane, whose segments begin at its first token. A prompt with fewer segments than
the longest begins later: its lane reads padding before, which its first token, of age 0, does not
see. Last segments of different lengths are padded at the end, and the padding is removed from the
cache. Other kinds of memory cannot remove it: incomplete segments are read again for every token,
as in training. A lane computes what it would compute alone, except that matrix products
of another batch size, or with a longer memory, may round differently in the last bit.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Literal

import torch
from torch import Tensor

from data_pipeline.readers import IdRules
from data_pipeline.readers.ids import text_of_value
from data_pipeline.tokenizers import Tokenizer
from txl_dist.config.run_config import Precision
from txl_dist.errors import TxlError
from txl_dist.generation.text import (
    DEFAULT_BATCH_SIZE,
    GrowingText,
    Sampling,
    TextLimits,
    describe_unknown,
)
from txl_dist.model.memory import SequenceState, memory_kind
from txl_dist.model.token_step import TokenStep
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.sequence import SequenceReader

# Shapes: B lanes, T segment tokens, D d_model, V vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratedText:
    text: str
    ids: list[int]
    """The token ids drawn, without the one that ended the text."""
    num_tokens: int
    finish_reason: Literal["end_of_document", "stop", "length"]


def generate_tokens(
    model: TransformerXL,
    prompt: Sequence[int],
    *,
    tgt_len: int,
    sampling: Sampling,
    seed: int,
    precision: Precision = "fp32",
    max_tokens: int | None = None,
) -> Iterator[int]:
    """Token ids that follow `prompt`: `max_tokens`, or without end.

    The prompt can have any length above 0: the model reads it in segments of `tgt_len` tokens, as
    in training. A model without memory sees the last `tgt_len` tokens and reads them again for
    every token it draws.
    """
    decoder = BatchDecoder(
        model,
        [prompt],
        seeds=[seed],
        tgt_len=tgt_len,
        sampling=sampling,
        precision=precision,
        max_tokens=max_tokens,
    )
    for _ in islice(count(), max_tokens):
        yield from decoder.draw()


def generate_texts(
    model: TransformerXL,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    tgt_len: int,
    sampling: Sampling,
    limits: TextLimits,
    seed: int,
    batch_size: int = DEFAULT_BATCH_SIZE,
    precision: Precision = "fp32",
) -> Iterator[GeneratedText]:
    """Continue every prompt, a text or token ids, in their order, `batch_size` at a time.

    Prompt i has its own random generator with the seed `seed` + i: alone, it is continued in the
    same way with that seed. Raises ValueError, before anything is generated, for a prompt without
    tokens.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts={prompts[:40]!r} is one text; give a list of texts")
    tokens = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    yield from generate_from_ids(
        model,
        tokenizer,
        tokens,
        seeds=range(seed, seed + len(tokens)),
        tgt_len=tgt_len,
        sampling=sampling,
        limits=limits,
        batch_size=batch_size,
        precision=precision,
    )


def generate_from_ids(
    model: TransformerXL,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    tgt_len: int,
    sampling: Sampling,
    limits: TextLimits,
    batch_size: int = DEFAULT_BATCH_SIZE,
    precision: Precision = "fp32",
) -> Iterator[GeneratedText]:
    """Continue the tokens of all prompts, each with its own seed, `batch_size` at a time."""
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        decoder = BatchDecoder(
            model,
            batch,
            seeds=seeds[first : first + batch_size],
            tgt_len=tgt_len,
            sampling=sampling,
            precision=precision,
            max_tokens=limits.max_tokens,
        )
        texts = [GrowingText(tokenizer, limits, after=prompt[-1]) for prompt in batch]
        unfinished = texts
        while unfinished:
            for text, token in zip(unfinished, decoder.draw(), strict=True):
                text.add(token)
            lanes = [lane for lane, text in enumerate(unfinished) if not text.finish_reason]
            if len(lanes) < len(unfinished):
                unfinished = [unfinished[lane] for lane in lanes]
                decoder.keep(lanes)
        for text in texts:
            text.close()
            assert text.finish_reason
            yield GeneratedText(text.text, text.ids, len(text.ids), text.finish_reason)


def prompt_tokens(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt, which begins a document. Raises ValueError if there are none.

    A warning names the symbols that the vocabulary does not have. The end-of-document id may be at
    both ends of a prompt of ids, and is dropped there.
    """
    # Training texts of some tokenizers start each document with the end-of-document id.
    start_of_document = [tokenizer.end_of_document] if tokenizer.opens_documents else []
    if isinstance(prompt, str):
        tokens = [*start_of_document, *tokenizer.encode(prompt).tolist()]
        if unknown := tokenizer.unknown_symbols(prompt):
            log.warning("prompt %r: %s", prompt[:40], describe_unknown(unknown))
    else:
        rules = IdRules(tokenizer.vocab_size, tokenizer.end_of_document)
        text = text_of_value(list(prompt), rules, "ids")
        tokens = [*start_of_document, *map(int, text.split())]
    if not tokens:
        raise ValueError(
            f"the prompt {prompt!r} has no tokens, and the tokenizer of this model has no token "
            "that starts a document; give some text"
        )
    return tokens


# --- tokens of a batch ----------------------------------------------------------------------------


class BatchDecoder:
    """`draw()` returns the next token of every lane, `max_tokens` times or without end; `keep()`
    drops lanes.

    A model without memory sees the last `tgt_len` tokens of a lane and reads them again for every
    token it draws.
    """

    def __init__(
        self,
        model: TransformerXL,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        tgt_len: int,
        sampling: Sampling,
        precision: Precision = "fp32",
        max_tokens: int | None = None,
    ) -> None:
        token_lists = [_checked_ids(prompt, model.config.num_ids) for prompt in prompts]
        self._model, self._tgt_len, self._sampling = model, tgt_len, sampling
        self._has_memory = memory_kind(model.config).receptive_tokens(tgt_len) != 0
        # A layer without memory sees the segment only.
        has_short = self._has_memory and 0 in model.config.mem_lens
        self._reads_segments_again = not model.config.memory_facts.keys_are_tokens or has_short
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._pending = [
            tokens if self._has_memory else tokens[-tgt_len:] for tokens in token_lists
        ]
        """Tokens of each lane that the model has not read."""
        self._num_read = [0] * len(prompts)
        # The last token is drawn and not read.
        num_read = max_tokens and max(map(len, token_lists)) + max_tokens - 1
        empty = partial(model.inference_state, max_tokens=num_read)
        self._reader = SequenceReader(
            model,
            state=(model.empty_memory if has_short else empty)(len(prompts)),
            tgt_len=tgt_len,
            precision=precision,
        )
        self._has_token_step = TokenStep.supports(model, self._reader.state)
        self._token_step: TokenStep | None = None

    def draw(self) -> list[int]:
        """Read what is pending, and draw one token per lane."""
        # All but the last segments of the prompts only fill the cache.
        while (longest := max(map(self._num_segments, self._pending))) > 1:
            has_begun = [self._num_segments(tokens) == longest for tokens in self._pending]
            self._read([self._tgt_len * begun for begun in has_begun])
        hidden_BD = self._read([len(tokens) for tokens in self._pending])
        with torch.inference_mode():
            logits_BV = self._reader.logits(hidden_BD).cpu()
        drawn = next_tokens(logits_BV, self._sampling, self._generators)
        for tokens, token in zip(self._pending, drawn, strict=True):
            tokens.append(token)
            del tokens[: -self._tgt_len]
        return drawn

    def keep(self, lanes: Sequence[int]) -> None:
        """Drop all lanes but these, which become lanes 0, 1, ..."""
        self._generators = [self._generators[lane] for lane in lanes]
        self._pending = [self._pending[lane] for lane in lanes]
        self._num_read = [self._num_read[lane] for lane in lanes]
        self._reader.select(lanes, [0] * len(lanes))

    def _num_segments(self, tokens: Sequence[int]) -> int:
        return -(-len(tokens) // self._tgt_len)

    def _read(self, lengths: Sequence[int]) -> Tensor:
        """Read the first `lengths` pending tokens; the last layer's output after them, [B, D]."""
        if self._has_token_step and set(lengths) == {1}:
            return self._read_one_token()
        num_tokens = max(lengths)
        input_BT = torch.zeros((len(lengths), num_tokens), dtype=torch.long)
        for row, length, tokens in zip(input_BT, lengths, self._pending, strict=True):
            row[:length] = torch.tensor(tokens[:length])
        age_BT = torch.tensor(self._num_read)[:, None] + torch.arange(num_tokens)
        before = self._reader.state
        with torch.inference_mode():
            hidden_BTD = self._reader.read(input_BT, age_BT)
            if self._reads_segments_again:
                self._keep_incomplete(lengths, before)
            else:
                self._advance(lengths, num_tokens)
        last_B = torch.tensor([max(length - 1, 0) for length in lengths])
        return hidden_BTD[torch.arange(len(lengths)), last_B]

    def _read_one_token(self) -> Tensor:
        """`_read` if every lane reads one token."""
        token_B = torch.tensor([tokens[0] for tokens in self._pending], device=self._reader.device)
        with torch.inference_mode(), self._reader.inference():
            if self._token_step is None:
                self._token_step = TokenStep(self._model, self._reader.state)
            hidden_BD = self._token_step(token_B, self._num_read)
        self._advance([1] * len(self._pending), 1)
        return hidden_BD

    def _keep_incomplete(self, lengths: Sequence[int], before: SequenceState) -> None:
        """Record complete segments only. Lanes that read a part of one keep their state."""
        is_complete = [length == self._tgt_len for length in lengths]
        self._advance([self._tgt_len * complete for complete in is_complete], self._tgt_len)
        for lane, complete in enumerate(is_complete):
            if not complete:
                self._reader.state.load_row(lane, before.row(lane))

    def _advance(self, lengths: Sequence[int], num_tokens: int) -> None:
        """Record that the lanes have read `lengths` tokens of a segment of `num_tokens`."""
        if not self._has_memory:  # in training it saw single segments only
            return
        self._pending = [
            tokens[length:] for tokens, length in zip(self._pending, lengths, strict=True)
        ]
        self._num_read = [sum(pair) for pair in zip(self._num_read, lengths, strict=True)]
        # A lane that has not begun needs no removal: no token sees what is before age 0.
        num_removed = [num_tokens - length if length else 0 for length in lengths]
        if any(num_removed):
            self._reader.select(range(len(lengths)), num_removed)


def _checked_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """Raises ValueError for text, for no tokens, and for an id outside the vocabulary."""
    if isinstance(prompt, str):
        raise ValueError(
            f"prompt {prompt[:40]!r} is text; give its token ids: prompt_tokens(tokenizer, prompt)"
        )
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise ValueError("the prompt needs at least one token, for example the end of a document")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(
            f"the prompt has ids from {min(tokens)} to {max(tokens)}: expected 0 to "
            f"{vocab_size - 1}"
        )
    return tokens


def next_tokens(
    logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[int]:
    """Sample one token id per lane. Top-k comes first, then temperature, then top-p.

    Each lane draws from its own generator, so its tokens do not depend on the other lanes. Raises
    TxlError if a lane's largest logit is NaN or Inf.
    """
    largest_B1 = logits_BV.amax(dim=-1, keepdim=True)
    if not largest_B1.isfinite().all():
        raise TxlError(
            "the model's logits are NaN or Inf, so no token can be drawn. Its training has "
            "diverged, or its precision is too low"
        )
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1).tolist()
    # Subtract the maximum first, so that division by a small temperature cannot overflow.
    scaled_BV = (logits_BV.double() - largest_B1) / sampling.temperature
    scaled_BV[logits_BV == -torch.inf] = -torch.inf  # NaN at an infinite temperature
    if sampling.top_k is not None and sampling.top_k < scaled_BV.shape[-1]:
        # By index, because a comparison with the k-th value would keep more than k tokens if
        # several are equal to it. From raw logits, because subtracting the maximum in floating
        # point can make different logits equal.
        tokens = logits_BV.topk(sampling.top_k).indices
        kept_BV = torch.full_like(scaled_BV, -torch.inf)
        scaled_BV = kept_BV.scatter(-1, tokens, scaled_BV.gather(-1, tokens))
    probability_BV = scaled_BV.softmax(dim=-1)
    if sampling.top_p is not None:
        probability_BV = _nucleus(probability_BV, sampling.top_p)
    # A token with probability p has the largest p / e, e exponentially distributed, with
    # probability p. torch.multinomial draws the same numbers, but from one generator for all lanes.
    exponential_BV = torch.empty_like(probability_BV)
    for exponential_V, generator in zip(exponential_BV, generators, strict=True):
        exponential_V.exponential_(generator=generator)
    return (probability_BV / exponential_BV).argmax(dim=-1).tolist()


def _nucleus(probability_BV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens with a total of at least `top_p`; zero others."""
    ordered_BV, token_BV = probability_BV.sort(descending=True)
    # A token is kept if the more likely ones sum to less than top_p, so the first always is.
    is_kept_BV = ordered_BV.cumsum(dim=-1) - ordered_BV < top_p
    return torch.zeros_like(probability_BV).scatter(-1, token_BV, ordered_BV * is_kept_BV)
