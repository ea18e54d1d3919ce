"""What a trained model is for: `txl generate`, `txl import` and `txl export`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from txl_dist.cli.options import (
    AsJson,
    Checkpoint,
    checkpoint_path,
    path_argument,
    print_result,
    running,
)
from txl_dist.convert import MAX_POSITIONS, require_source
from txl_dist.errors import ConfigError, DataError
from txl_dist.generation.text import Sampling, TextLimits, read_prompts, stream_text

if TYPE_CHECKING:
    from data_pipeline.tokenizers import Tokenizer
    from txl_dist.convert.stored_model import StoredModel
    from txl_dist.model.config import ModelConfig
    from txl_dist.model.transformer_xl import TransformerXL

SAMPLING, LIMITS = Sampling(), TextLimits()


# --- txl generate ---------------------------------------------------------------------------------


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
        "".join((prompt, *(stop or ()))).encode()
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
    options: dict[str, Any] = {"sampling": sampling, "tgt_len": stored.tgt_len}
    if not prompts and not as_json:
        new_tokens = generate_tokens(model, ids[0], seed=seed, max_tokens=max_tokens, **options)
        print(prompt, end="")
        for text in stream_text(new_tokens, tokenizer, limits, after=ids[0][-1]):
            print(text, end="", flush=True)
        print()
        return
    seeds = range(seed, seed + len(ids))
    texts = generate_from_ids(model, tokenizer, ids, seeds=seeds, limits=limits, **options)
    if not prompts:
        content = {"checkpoint": str(stored.path), "prompt": prompt, **asdict(next(texts))}
        print(json.dumps(content))
        return
    for line, (of_line, generated) in enumerate(zip(given, texts, strict=True), start=1):
        result = {"line": line, "prompt": of_line, "seed": seed + line - 1}
        print(json.dumps({**result, **asdict(generated)}), flush=True)


def _token_of(token: str, tokenizer: "Tokenizer") -> int:
    """The id of a `--stop-token`. Raises ConfigError for another text than that of one token."""
    if token.isascii() and token.isdecimal():
        ids = [int(token)]
        is_one = ids[0] < tokenizer.vocab_size
    else:
        ids = tokenizer.encode(token).tolist()
        is_one = len(ids) == 1 and tokenizer.decode(ids) == token
    if not is_one:
        raise ConfigError(
            f"--stop-token {token!r} is not one token of this model, nor one of its "
            f"{tokenizer.vocab_size} ids. To end before a longer text: --stop {token!r}"
        )
    return ids[0]


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


# --- txl import and txl export -------------------------------------------------------------------


Out = Annotated[
    Path,
    typer.Option(help="New or empty directory to write.", parser=path_argument),
]


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A directory of transformers (Llama, Mistral, Qwen2, Qwen3, TransfoXL), or a "
            "state dict of the paper's code as .npz, with its constructor arguments as "
            "config_json.",
            parser=path_argument,
        ),
    ],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Convert weights of other systems.

    Writes model.safetensors, config.json and, if the source has one, the tokenizer. No code in the
    source is executed.

    Example: txl import downloads/Qwen3-0.6B --out models/qwen3
    """
    require_source(source)  # before torch is imported
    from txl_dist.convert.original_model import read_model
    from txl_dist.convert.stored_model import write_exported

    found = read_model(source)
    write_exported(out, found.model, found.tokenizer, found.reading)
    origin = {"source": str(source), "format": found.format}
    no_ids = "" if found.tokenizer else "\nno tokenizer: it reads data of its own ids only"
    _print_model(
        origin, out, found.model, as_json=as_json, note=_reach(found.model.config) + no_ids
    )


def _reach(config: "ModelConfig") -> str:
    """What a reader should know of the window of a model that was trained without one."""
    if not config.encoding.rotates:
        return ""
    if config.same_length:
        return f"\na token sees {config.mem_len:,} tokens per layer, itself included (mem_len)"
    return (
        "\nit has no window: it is the same function for documents of up to "
        f"{config.mem_len:,} tokens (mem_len) and a segment; to train it or to read longer ones, "
        "choose a memory: model.mem_len, txl eval --mem-len"
    )


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or a run directory (its newest checkpoint). With `transformers` "
            "also a directory that txl export or txl import wrote.",
            parser=checkpoint_path,
        ),
    ],
    out: Out,
    format_: Annotated[
        Literal["txl", "transformers", "hf"],
        typer.Option(
            "--format",
            help="`txl`: weights, config and tokenizer. `transformers`: what "
            "AutoModelForCausalLM.from_pretrained loads, as Qwen3, Qwen2, Mistral or Llama. `hf`: "
            "of other models, with one Python file that runs the model with torch alone.",
        ),
    ] = "txl",
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="With `transformers`: of the weights."),
    ] = "float32",
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_POSITIONS,
            help="With `transformers`: keys that a token sees, for a model trained without "
            "same_length. Default: with --data the best of several, else mem_len + tgt_len / 2.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="With `transformers`: a dataset to choose the window."),
    ] = None,
    split: Annotated[str, typer.Option(help="The split of --data.")] = "valid",
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A result of txl eval --json for the model card; can be repeated. Default: all "
            "results of these weights that txl eval has kept in the run.",
            parser=path_argument,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint, for txl or for others.

    The files are model.safetensors, config.json and tokenizer.json. If the run averaged its weights
    (optimizer.averaging), the average is written.

    Example: txl export runs/quickstart --out models/quickstart
    """
    if scores and format_ == "txl":
        raise ConfigError(
            "--scores is for the model card; add --format hf or --format transformers"
        )
    if (window or data or dtype != "float32") and format_ != "transformers":
        raise ConfigError("--dtype, --window and --data need --format transformers; add it")
    if format_ == "transformers":
        _export_for_transformers(
            checkpoint,
            out,
            window=window,
            data=data,
            split=split,
            dtype=dtype,
            scores=scores or [],
            as_json=as_json,
        )
        return
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.tensors import load_model
    from txl_dist.convert.stored_model import Reading, write_exported

    path = resolve_checkpoint(checkpoint)
    model, tokenizer, manifest = load_model(path)
    # How the model read its training text: txl eval and txl generate take it as their default.
    reading = Reading(tgt_len=manifest.segment_len, reset=manifest.run["data.reset"])
    if format_ == "hf":
        from txl_dist.analysis.model_card import card
        from txl_dist.convert.hub import write_for_hub

        text = card(path, manifest, model, tokenizer, scores=scores or ())
        write_for_hub(out, model, tokenizer, reading, card=text)
    else:
        write_exported(out, model, tokenizer, reading)
    _print_model({"source": str(path), "format": "checkpoint"}, out, model, as_json=as_json)


def _choose_window(
    stored: "StoredModel", given: int | None, data: str | None, split: str
) -> tuple[int | None, dict[int, float]]:
    """The window, None for all tokens, and nats per token by window if any were scored.

    A model that was trained with `same_length` has one. Others see more keys at the end of a
    segment than at its start, which no window does.
    """
    config, tgt_len = stored.config, stored.tgt_len
    if data is not None and (given or config.same_length or not config.mem_len):
        raise ConfigError(
            "--data chooses a window, and this one is known: by --window, by the model's "
            "same_length, or because it has no memory. Leave it out"
        )
    if given is not None or config.mem_len == 0:
        return given, {}
    if config.same_length:
        return min(config.mem_lens), {}
    if data is None:
        return (None if stored.whole_documents else config.mem_len + tgt_len // 2), {}
    from txl_dist.evaluation.distributed import evaluate
    from txl_dist.evaluation.spec import evaluation_spec

    nats = {}
    for window in sorted({config.mem_len + tgt_len * n // 4 for n in (0, 1, 2, 3, 4)}):
        spec = evaluation_spec(stored.path, data, split=split, mem_len=window, same_length=True)
        nats[window] = evaluate(spec).sums.nats_per_token
    return min(nats, key=nats.__getitem__), nats


def _export_for_transformers(
    checkpoint: Path,
    out: Path,
    *,
    window: int | None,
    data: str | None,
    split: str,
    dtype: str,
    scores: list[Path],
    as_json: bool,
) -> None:
    import torch

    from txl_dist.analysis.model_card import TransformersExport, card
    from txl_dist.checkpoint.manifest import MANIFEST_NAME, load_checkpoint_manifest
    from txl_dist.convert.hub import write_for_transformers
    from txl_dist.convert.llama_family import require_family
    from txl_dist.convert.stored_model import find_model

    stored = find_model(checkpoint)
    require_family(stored.config)  # before anything is scored
    is_run = (stored.path / MANIFEST_NAME).is_file()
    if scores and not is_run:
        raise ConfigError(f"--scores is for the model card of a run, not of {checkpoint}")
    chosen, nats = _choose_window(stored, window, data, split)
    model, tokenizer = stored.load(stored.config)
    text = None
    if is_run and tokenizer is not None:
        manifest = load_checkpoint_manifest(stored.path)
        nats_of_window = nats.get(chosen or 0)
        export = TransformersExport(
            dtype=dtype, window=chosen, nats=nats_of_window, data=data or "", split=split
        )
        text = card(stored.path, manifest, model, tokenizer, scores=scores, export=export)
    write_for_transformers(
        out, model, tokenizer, stored.tgt_len, window=chosen, dtype=getattr(torch, dtype), card=text
    )
    note = f"\nwindow: {chosen or 'none'}"
    if nats:
        scored = ", ".join(f"{each} {value:.5f}" for each, value in nats.items())
        note += f"; nats per token of {split} by window: {scored}"
    origin = {"source": str(checkpoint), "format": "transformers", "window": chosen}
    _print_model(origin, out, model, as_json=as_json, note=note)


def _print_model(
    origin: dict[str, Any], out: Path, model: "TransformerXL", *, as_json: bool, note: str = ""
) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    text = f"{out}: {num_parameters:,} parameters, from {origin['source']} ({origin['format']})"
    text += note
    content = {**origin, "out": str(out), "parameters": num_parameters}
    print_result(content, text, as_json=as_json)
