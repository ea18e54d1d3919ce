"""`txl generate`: continue a text, or every prompt of a file, with a trained model."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.system.files import explain_disk_errors, require_writable, write_file
from txl_dist.cli.options import AsJson, Checkpoint, PrecisionOption, path_argument
from txl_dist.cli.progress import WorkUnit, running, work_progress
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
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --prompts: write the results to this file when all are there.",
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
    if out and not prompts:
        raise ConfigError("--out needs --prompts FILE; for one prompt, redirect the output: > FILE")
    if out:
        require_writable(out.parent)
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
    results = (
        json.dumps({"line": line, "prompt": of_line, "seed": seed + line - 1, **asdict(text)})
        for line, (of_line, text) in enumerate(zip(given, texts, strict=True), start=1)
    )
    _write_results(results, len(ids), out)


def _token_of(token: str, tokenizer: "Tokenizer") -> int:
    """The id of a `--stop-token`. Raises ConfigError for another text than that of one token."""
    if token.isascii() and token.isdecimal() and len(token) < 11:
        if int(token) < tokenizer.vocab_size:
            return int(token)
        raise ConfigError(
            f"--stop-token {token}: expected an id from 0 to {tokenizer.vocab_size - 1}"
        )
    ids = tokenizer.encode(token).tolist()
    if len(ids) != 1 or tokenizer.decode(ids) != token:
        raise ConfigError(
            f"--stop-token {token!r} is not one token of this model. To end before a longer text: "
            f"--stop {token!r}"
        )
    return int(ids[0])


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


def _write_results(results: Iterator[str], num_prompts: int, out: Path | None) -> None:
    """Print every result when it is there, or write all to a file at the end."""
    if out is None:
        for line in results:
            print(line, flush=True)
        return
    written = []
    with work_progress(WorkUnit("prompts")) as progress:
        for line in results:
            written.append(f"{line}\n")
            progress("generating", len(written), num_prompts)
    with explain_disk_errors("writing the results", out.parent):
        write_file(out, "".join(written).encode())
