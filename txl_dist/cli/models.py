"""Models that are stored: `txl checkpoint`, `txl import` and `txl export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data_pipeline.errors import counted
from txl_dist.cli.options import (
    AsJson,
    Checkpoint,
    Run,
    SavedCheckpoint,
    path_argument,
    print_result,
)
from txl_dist.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from txl_dist.convert.stored_model import StoredModel
    from txl_dist.model.config import ModelConfig
    from txl_dist.model.transformer_xl import TransformerXL

app = typer.Typer(help="List and verify checkpoints.", no_args_is_help=True)


@app.command("list")
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the complete checkpoints of a run, oldest first.

    Example: txl checkpoint list runs/quickstart
    """
    from txl_dist.checkpoint.directory import CheckpointDirectory
    from txl_dist.checkpoint.manifest import load_checkpoint_manifest
    from txl_dist.training.scores import ScoreTable
    from txl_dist.training.state import load_state

    directory = CheckpointDirectory(run)
    if not directory.path.is_dir():
        raise CheckpointError(f"{run} has no checkpoints directory; give a run directory")
    pointers = directory.pointers_by_step()
    scores, rows = ScoreTable(directory, is_due=lambda step: False), []
    for step in directory.steps():
        path = directory.at(step)
        row: dict[str, Any] = {"step": step, "path": str(path), "pointers": pointers.get(step, [])}
        try:
            manifest = load_checkpoint_manifest(path)
            score = scores.get(step)
            row |= {
                "bytes": sum(entry.bytes for entry in manifest.files.values()),
                "tokens": load_state(path, manifest).tokens,
                "num_ranks": manifest.num_ranks,
                "nats_per_token": score and score.nats_per_token,
            }
        except CheckpointError as error:  # One damaged checkpoint must not hide the others.
            row["damage"] = str(error)
        rows.append(row)
    content = {"run": str(run), "checkpoints": rows}
    text = "\n".join(map(_line, rows)) or f"{run} has no complete checkpoint yet"
    print_result(content, text, as_json=as_json)


def _line(row: dict[str, Any]) -> str:
    nats = row.get("nats_per_token")
    summary = row.get("damage") or (
        f"{row['bytes']:>14,} bytes  {row['tokens']:>14,} tokens  "
        + counted(row["num_ranks"], "rank")
        + ("" if nats is None else f"  validation loss {nats:.4f}")
    )
    return "  ".join([f"{row['path']}  {summary}", *row["pointers"]])


@app.command()
def verify(checkpoint: SavedCheckpoint, as_json: AsJson = False) -> None:
    """Hash every file and compare it with the manifest. Damage is listed; exit code 4.

    Example: txl checkpoint verify runs/quickstart
    """
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.reader import verify_checkpoint

    path = resolve_checkpoint(checkpoint)
    manifest = verify_checkpoint(path)
    size = sum(entry.bytes for entry in manifest.files.values())
    content = {"path": str(path), "step": manifest.step, "bytes": size}
    text = f"{path}: complete, {len(manifest.files)} files, {size:,} bytes, all hashes match"
    print_result(content, text, as_json=as_json)


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
    from txl_dist.convert import require_source

    require_source(source)  # before torch is imported
    from txl_dist.convert.other_programs import read_model
    from txl_dist.convert.stored_model import write_exported

    found = read_model(source)
    write_exported(out, found.model, found.tokenizer, found.reading)
    origin = {"source": str(source), "format": found.format}
    _print_model(origin, out, found.model, as_json=as_json, note=_reach(found.model.config))


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
    checkpoint: Checkpoint,
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
        choice = _Window(given=window, data=data, split=split)
        _export_for_transformers(checkpoint, out, choice, dtype, scores or [], as_json=as_json)
        return
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.reader import load_model
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """The options of `--format transformers`."""

    given: int | None
    data: str | None
    split: str

    def choose(self, stored: "StoredModel", *, is_run: bool) -> tuple[int | None, dict[int, float]]:
        """The window, None for all tokens, and nats per token by window if any were scored.

        A model that was trained with `same_length` has one. Others see more keys at the end of a
        segment than at its start, which no window does.
        """
        config, tgt_len = stored.config, stored.tgt_len
        if self.given is not None or config.mem_len == 0:
            return self.given, {}
        if config.same_length:
            return min(config.mem_lens), {}
        if self.data is not None:
            from txl_dist.evaluation.distributed import evaluate
            from txl_dist.evaluation.spec import evaluation_spec

            nats = {}
            for window in sorted({config.mem_len + tgt_len * n // 4 for n in (0, 1, 2, 3, 4)}):
                spec = evaluation_spec(
                    stored.path, self.data, split=self.split, mem_len=window, same_length=True
                )
                nats[window] = evaluate(spec).sums.nats_per_token
            return min(nats, key=nats.__getitem__), nats
        return (config.mem_len + tgt_len // 2 if is_run else None), {}


def _export_for_transformers(
    checkpoint: Path,
    out: Path,
    window: _Window,
    dtype: str,
    scores: list[Path],
    *,
    as_json: bool,
) -> None:
    import torch

    from txl_dist.analysis.model_card import card
    from txl_dist.checkpoint.manifest import MANIFEST_NAME, load_checkpoint_manifest
    from txl_dist.convert.hub import write_for_transformers
    from txl_dist.convert.llama_family import require_family
    from txl_dist.convert.stored_model import find_model

    stored = find_model(checkpoint)
    require_family(stored.config)  # before anything is scored
    is_run = (stored.path / MANIFEST_NAME).is_file()
    chosen, nats = window.choose(stored, is_run=is_run)
    model, tokenizer = stored.load(stored.config)
    text = None
    if is_run and tokenizer is not None:
        manifest = load_checkpoint_manifest(stored.path)
        text = card(stored.path, manifest, model, tokenizer, scores=scores, for_transformers=True)
    write_for_transformers(
        out, model, tokenizer, stored.tgt_len, window=chosen, dtype=getattr(torch, dtype), card=text
    )
    note = f"\nwindow: {chosen or 'none'}"
    if nats:
        scored = ", ".join(f"{each} {value:.5f}" for each, value in nats.items())
        note += f"; nats per token of {window.split} by window: {scored}"
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
