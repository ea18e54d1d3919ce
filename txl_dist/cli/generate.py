"""`txl generate`: continue a text, or every prompt of a file, with a trained model."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txl_dist.cli.options import AsJson, Checkpoint, PrecisionOption, path_argument
from txl_dist.cli.progress import running
from txl_dist.errors import ConfigError, DataError
from txl_dist.generation.text import (
    DEFAULT_BATCH_SIZE,
    Sampling,
    TextLimits,
    read_prompts,
    stream_text,
)

if TYPE_CHECKING:
    from data_pipeline.tokenizers import Tokenizer

SAMPLING, LIMITS = Sampling(), TextLimits()


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str, typer.Option(help="Text to continue; empty: start a new document.")
    ] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Continue every line of this file, or in a file *.jsonl every JSON object with a "
            'key "prompt", "text" or "ids" (token ids). The results are lines of JSON.',
            parser=path_argument,
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="With --prompts: number of prompts at a time.")
    ] = DEFAULT_BATCH_SIZE,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of tokens to write.")
    ] = LIMITS.max_tokens,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text. Can be given several times."),
    ] = None,
    stop_token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID|TOKEN",
            help="End before this token: an id, or a name or text that is one token. Can be given "
            "several times.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 always takes the most likely token.")
    ] = SAMPLING.temperature,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from the k most likely tokens.")
    ] = SAMPLING.top_k,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens whose probabilities add up to p."),
    ] = SAMPLING.top_p,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**62,
            help="The same seed gives the same text. Prompt i of a file: seed + i.",
        ),
    ] = 0,
    precision: PrecisionOption = "fp32",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt. The text is printed while it is generated.

    It ends at the end of its document, at --stop or --stop-token, or after --max-tokens.

    Example: txl generate runs/quickstart --prompt 'def main():' --max-tokens 200
    """
    if prompts and prompt:
        raise ConfigError("--prompt and --prompts: give one of them")
    try:
        # Bytes that are not UTF-8 reach Python as lone surrogates, which cannot be encoded.
        "".join((prompt, *(stop or ()))).encode("utf-8")
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        limits = TextLimits(max_tokens=max_tokens, stop=tuple(stop or ()))
    except ValueError as error:
        raise ConfigError(f"txl generate: {error}") from None
    given = read_prompts(prompts) if prompts else [prompt]
    with running(f"loading {checkpoint}"):
        from txl_dist.convert.stored_model import find_model
        from txl_dist.generation.generate import generate_from_ids, generate_tokens
        from txl_dist.runtime.device import default_device

        stored = find_model(checkpoint)
        model, tokenizer = stored.load_with_tokenizer()
        model = model.to(default_device())
    stop_tokens = frozenset(_token_of(token, tokenizer) for token in stop_token or ())
    limits = replace(limits, stop_tokens=stop_tokens)
    ids = [*_ids_of_prompts(given, prompts, tokenizer)]
    options: dict[str, Any] = {
        "sampling": sampling,
        "tgt_len": stored.tgt_len,
        "precision": precision,
    }
    if not prompts and not as_json:
        new_tokens = generate_tokens(model, ids[0], seed=seed, **options)
        _print_growing(prompt, stream_text(new_tokens, tokenizer, limits, after=ids[0][-1]))
        return
    seeds = range(seed, seed + len(ids))
    texts = generate_from_ids(
        model, tokenizer, ids, seeds=seeds, limits=limits, batch_size=batch, **options
    )
    if not prompts:
        content = {"checkpoint": str(stored.path), "prompt": prompt, **asdict(next(texts))}
        print(json.dumps(content))
        return
    for line, (of_line, text) in enumerate(zip(given, texts, strict=True), start=1):
        result = {"line": line, "prompt": of_line, "seed": seed + line - 1}
        print(json.dumps({**result, **asdict(text)}), flush=True)


def _token_of(token: str, tokenizer: "Tokenizer") -> int:
    """The id of a `--stop-token`. Raises ConfigError for another text than that of one token."""
    if token.isascii() and token.isdecimal():
        id_ = int(token)
        is_one = id_ < tokenizer.vocab_size
    else:
        ids = tokenizer.encode(token).tolist()
        id_ = ids[0] if ids else 0
        is_one = len(ids) == 1 and tokenizer.decode(ids) == token
    if not is_one:
        raise ConfigError(
            f"--stop-token {token!r} is not one token of this model, nor one of its "
            f"{tokenizer.vocab_size} ids. To end before a longer text: --stop {token!r}"
        )
    return id_


def _ids_of_prompts(
    given: "Sequence[str | list[int]]", file: Path | None, tokenizer: "Tokenizer"
) -> Iterator[list[int]]:
    """The token ids of each prompt. Raises an error that names the first one without any."""
    from txl_dist.generation.generate import prompt_tokens

    for line, prompt in enumerate(given, start=1):
        try:
            yield prompt_tokens(tokenizer, prompt)
        except ValueError as error:
            if file:
                raise DataError(f"{file}, line {line}: {error}") from None
            raise ConfigError(f"--prompt: {error}") from None


def _print_growing(prompt: str, texts: Iterator[str]) -> None:
    """Print the prompt, and every part of its continuation when it is there."""
    sys.stdout.write(prompt)
    for text in texts:
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
