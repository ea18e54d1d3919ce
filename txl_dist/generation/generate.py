"""Generation from Python: the tokens of one prompt as an iterator, or the texts of many prompts.

for text in generate_texts(model, tokenizer, ["Once", "def f("], tgt_len=128,
                           sampling=Sampling(), limits=TextLimits(max_tokens=50), seed=0):
    print(text.text)

Prompts begin documents, as `prompt_tokens` encodes them. A warning names the symbols of prompts and
stop strings that the vocabulary does not have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from data_pipeline.readers import IdRules
from data_pipeline.readers.ids import text_of_value
from data_pipeline.tokenizers import Tokenizer
from txl_dist.config.run_config import Precision
from txl_dist.generation.decoder import BatchDecoder
from txl_dist.generation.text import (
    DEFAULT_BATCH_SIZE,
    GrowingText,
    Sampling,
    TextLimits,
    unknown_in_prompt,
    warn_of_unknown,
)
from txl_dist.model.transformer_xl import TransformerXL


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The continuation of one prompt."""

    text: str
    ids: list[int]
    """The token ids drawn, without the one that ended the text."""
    num_tokens: int
    """The number of `ids`."""
    finish_reason: Literal["end_of_document", "stop", "length"]
    unknown_symbols: Mapping[str, int] = field(default_factory=dict)
    """How often each symbol of the prompt occurs that the vocabulary does not have."""


def generate_tokens(
    model: TransformerXL,
    prompt: Sequence[int],
    *,
    tgt_len: int,
    sampling: Sampling,
    seed: int,
    end: int | None = None,
    precision: Precision = "fp32",
) -> Iterator[int]:
    """Token ids that follow `prompt`, without limit or until `end` is drawn.

    The prompt can have any length above 0: the model reads it in segments of `tgt_len` tokens, as
    in training. A model without memory sees the last `tgt_len` tokens and reads them again for
    every token it draws.
    """
    decoder = BatchDecoder(
        model, [prompt], seeds=[seed], tgt_len=tgt_len, sampling=sampling, precision=precision
    )
    while True:
        (token,) = decoder.draw()
        if token == end:
            return
        yield token


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
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    tokens = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    for string in limits.stop:
        warn_of_unknown(tokenizer, "stop string", string)
    for first in range(0, len(tokens), batch_size):
        batch = tokens[first : first + batch_size]
        texts = generate_batch(
            model,
            tokenizer,
            batch,
            seeds=range(seed + first, seed + first + len(batch)),
            tgt_len=tgt_len,
            sampling=sampling,
            limits=limits,
            precision=precision,
        )
        for prompt, text in zip(prompts[first:], texts, strict=False):
            yield replace(text, unknown_symbols=dict(unknown_in_prompt(tokenizer, prompt)))


def generate_batch(
    model: TransformerXL,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    tgt_len: int,
    sampling: Sampling,
    limits: TextLimits,
    precision: Precision = "fp32",
) -> list[GeneratedText]:
    """Continue the tokens of all prompts at the same time, each with its own seed."""
    decoder = BatchDecoder(
        model, prompts, seeds=seeds, tgt_len=tgt_len, sampling=sampling, precision=precision
    )
    texts = [GrowingText(tokenizer, limits, after=prompt[-1]) for prompt in prompts]
    unfinished = texts
    while unfinished:
        for text, token in zip(unfinished, decoder.draw(), strict=True):
            text.add(token)
        lanes = [lane for lane, text in enumerate(unfinished) if not text.finish_reason]
        if len(lanes) < len(unfinished):
            unfinished = [unfinished[lane] for lane in lanes]
            decoder.keep(lanes)
    results = []
    for text in texts:
        text.close()
        assert text.finish_reason
        results.append(GeneratedText(text.text, text.ids, len(text.ids), text.finish_reason))
    return results


def prompt_tokens(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt, which begins a document. Raises ValueError if there are none.

    A warning names the symbols that the vocabulary does not have. The end-of-document id may be at
    both ends of a prompt of ids, and is dropped there.
    """
    tokens = require_prompt(tokenizer, prompt)
    warn_of_unknown(tokenizer, "prompt", prompt)
    return tokens


def require_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """As `prompt_tokens`, without a warning."""
    # Training texts of some tokenizers start each document with the end-of-document id.
    start_of_document = [tokenizer.end_of_document] if tokenizer.opens_documents else []
    if isinstance(prompt, str):
        tokens = [*start_of_document, *tokenizer.encode(prompt).tolist()]
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
