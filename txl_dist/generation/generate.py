"""Generation from Python: the tokens of one prompt as an iterator, or the texts of many prompts.

for text in generate_texts(model, tokenizer, ["Once", "def f("], tgt_len=128,
                           sampling=Sampling(), limits=TextLimits(max_tokens=50), seed=0):
    print(text.text)

Prompts begin documents, as `prompt_tokens` encodes them. A warning names the symbols of prompts
that the vocabulary does not have.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    describe_unknown,
)
from txl_dist.model.transformer_xl import TransformerXL

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The continuation of one prompt."""

    text: str
    ids: list[int]
    """The token ids drawn, without the one that ended the text."""
    num_tokens: int
    """The number of `ids`."""
    finish_reason: Literal["end_of_document", "stop", "length"]


def generate_tokens(
    model: TransformerXL,
    prompt: Sequence[int],
    *,
    tgt_len: int,
    sampling: Sampling,
    seed: int,
    precision: Precision = "fp32",
) -> Iterator[int]:
    """Token ids that follow `prompt`, without end.

    The prompt can have any length above 0: the model reads it in segments of `tgt_len` tokens, as
    in training. A model without memory sees the last `tgt_len` tokens and reads them again for
    every token it draws.
    """
    decoder = BatchDecoder(
        model, [prompt], seeds=[seed], tgt_len=tgt_len, sampling=sampling, precision=precision
    )
    while True:
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
