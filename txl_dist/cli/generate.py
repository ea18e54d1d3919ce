"""`txl generate`: continue a text with a checkpoint."""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from txl_dist.cli.evaluate import CHECKPOINT
from txl_dist.cli.paths import local_path_parser


def generate(
    checkpoint: Annotated[Path, typer.Argument(help=CHECKPOINT, parser=local_path_parser())],
    prompt: Annotated[str, typer.Option(help="Text to continue; empty: a new document.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest of mass p.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    precision: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Of matrix products; sums are fp32.")
    ] = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a prompt; the text streams as it is drawn.

    Example: txl generate runs/quickstart --prompt 'def main():' --max-tokens 200
    """
    from txl_dist.convert.stored_model import find_model
    from txl_dist.errors import ConfigError
    from txl_dist.generation.generate import generate_tokens, stream_text
    from txl_dist.generation.sampling import Sampling

    try:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("--prompt is not valid text in this terminal's encoding") from None
    except ValueError as error:
        raise ConfigError(f"txl generate: {error}") from None
    stored = find_model(checkpoint)
    model, tokenizer = stored.load_with_tokenizer()
    opening = [tokenizer.end_of_document] if tokenizer.opens_documents else []
    start = [*opening, *tokenizer.encode(prompt).tolist()]
    if not start:
        raise ConfigError(
            "--prompt is empty, but this model knows no start of a document; give text"
        )
    tokens = generate_tokens(
        model,
        start,
        tgt_len=stored.tgt_len,
        sampling=sampling,
        seed=seed,
        end=tokenizer.end_of_document,
        precision=precision,
    )
    texts = stream_text(islice(tokens, max_tokens), tokenizer, after=start[-1])
    if as_json:
        print(
            json.dumps({"checkpoint": str(stored.path), "prompt": prompt, "text": "".join(texts)})
        )
        return
    sys.stdout.write(prompt)
    for text in texts:
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
