"""`txl generate`: continue a text with a trained model."""

import json
import sys
from itertools import islice
from typing import Annotated

import typer

from txl_dist.cli.options import AsJson, Checkpoint, PrecisionOption


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str, typer.Option(help="Text to continue; empty: start a new document.")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of tokens to write.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from the k most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens whose probabilities add up to p."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    precision: PrecisionOption = "fp32",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt. The text is printed while it is generated.

    Example: txl generate runs/quickstart --prompt 'def main():' --max-tokens 200
    """
    from txl_dist.convert.stored_model import find_model
    from txl_dist.errors import ConfigError
    from txl_dist.generation.generate import generate_tokens, stream_text
    from txl_dist.generation.sampling import Sampling

    try:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        prompt.encode("utf-8")  # Bytes that are not UTF-8 reach Python as lone surrogates.
    except UnicodeEncodeError:
        raise ConfigError("--prompt is not valid text in this terminal's encoding") from None
    except ValueError as error:
        raise ConfigError(f"txl generate: {error}") from None
    stored = find_model(checkpoint)
    model, tokenizer = stored.load_with_tokenizer()
    # Training texts of some tokenizers start each document with the end-of-document id.
    start_of_document = [tokenizer.end_of_document] if tokenizer.opens_documents else []
    tokens = [*start_of_document, *tokenizer.encode(prompt).tolist()]
    if not tokens:
        raise ConfigError(
            "--prompt is empty, and the tokenizer of this model has no token that starts a "
            "document; give some text"
        )
    new_tokens = generate_tokens(
        model,
        tokens,
        tgt_len=stored.tgt_len,
        sampling=sampling,
        seed=seed,
        end=tokenizer.end_of_document,
        precision=precision,
    )
    texts = stream_text(islice(new_tokens, max_tokens), tokenizer, after=tokens[-1])
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
