"""What runs have written: `txl report`, `status`, `checkpoint`, `track`, `import`, `export`."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data_pipeline.system.files import write_file
from txl_dist.cli.options import AsJson, SavedCheckpoint, path_argument, print_result
from txl_dist.cli.progress import running
from txl_dist.errors import CheckpointError, ConfigError, TxlError

if TYPE_CHECKING:
    from txl_dist.analysis.run_record import RunRecord
    from txl_dist.model.transformer_xl import TransformerXL

checkpoint_app = typer.Typer(help="List and verify checkpoints.", no_args_is_help=True)
track_app = typer.Typer(help="Tracking of runs in MLflow.", no_args_is_help=True)

COMPARISON = "comparison.html"
PROMPT_CHARACTERS = 80
"""Of the held-out text, for `txl report --generate`."""

MLFLOW_SECONDS = 120.0
"""For a page: the import of mlflow, and one file."""

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", parser=path_argument)]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A run directory; of several runs, a comparison.",
            parser=path_argument,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Default: RUN/report.html, of several runs comparison.html next to the first one.",
            parser=path_argument,
        ),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Show also the results in this directory, which txl eval, recl or attention has "
            "written with --out. Those in RUN are shown anyway. Can be repeated.",
            parser=path_argument,
        ),
    ] = None,
    generate: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Also let the newest checkpoint of each run continue the beginning of the "
            "held-out text, which loads the model.",
        ),
    ] = 0,
    to_mlflow: Annotated[
        bool,
        typer.Option(
            "--to-mlflow", help="Also keep the page with the runs in MLflow, as an artifact."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about a run: curves, scores, wall time, events, what the memory is worth.

    Of several runs: curves over each other, settings that differ, scores and goodput side by side.
    The page needs no other file and no network. The runs may be in progress.

    Example: txl report runs/quickstart
    """
    from txl_dist.analysis.run_record import read_run

    records = [read_run(run, results=results or []) for run in runs]
    from txl_dist.analysis.run_report import run_page  # imports matplotlib

    if generate:
        records = [_with_generated_text(record, generate) for record in records]
    path = out or (runs[0] / "report.html" if len(runs) == 1 else runs[0].parent / COMPARISON)
    page = run_page(records)
    try:
        write_file(path, page.encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Give another place: --out FILE"
        ) from None
    for run in runs if to_mlflow else ():
        _keep_in_mlflow(run, path)
    newest = [{"run": str(each.path), "step": each.last["step"]} for each in records]
    content = {**newest[0], "report": str(path), "runs": newest}
    print_result(content, f"wrote {path}; open it in a browser", as_json=as_json)


def _with_generated_text(record: "RunRecord", max_tokens: int) -> "RunRecord":
    with running(f"loading the newest checkpoint of {record.path}"):
        from txl_dist.convert.stored_model import find_model
        from txl_dist.generation.generate import generate_texts
        from txl_dist.generation.text import Sampling, TextLimits

        stored = find_model(record.path)
        model, tokenizer = stored.load_with_tokenizer()
    options: dict[str, Any] = {
        "sampling": Sampling(),
        "limits": TextLimits(max_tokens=max_tokens),
        "seed": 0,
    }
    try:
        prompt = record.sample[:PROMPT_CHARACTERS] or "\n"
        (text,) = generate_texts(model, tokenizer, [prompt], tgt_len=stored.tgt_len, **options)
    except ValueError as error:  # a vocabulary without these symbols
        raise ConfigError(f"--generate: {record.path}: {error}") from None
    return replace(record, generated=(prompt, text.text))


def _keep_in_mlflow(run: Path, page: Path) -> None:
    from txl_dist.config.redaction import HIDDEN, redact
    from txl_dist.tracking.tracker import STATE, TrackingState, child_environment, server_of

    state = TrackingState.load(run / STATE)
    if state is None or state.run_id is None:
        raise ConfigError(
            f"{page} is written, but {run} has no run in MLflow: it was not tracked "
            "(tracking.enabled), or its metrics were not delivered yet (txl track sync RUN)"
        )
    server = server_of(state.server, run)
    if HIDDEN in server:  # credentials are not stored
        server = os.environ.get("MLFLOW_TRACKING_URI", server)
    command = [sys.executable, "-m", "mlflow", "artifacts", "log-artifact"]
    command += ["--local-file", str(page), "--run-id", state.run_id]
    with running(f"recording {page.name} in MLflow"):
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=MLFLOW_SECONDS,
                env={**child_environment(), "MLFLOW_TRACKING_URI": server},
                check=False,
            )
            last_line = done.stderr.strip().rpartition("\n")[2]
            reason = redact(last_line or f"exit code {done.returncode}") if done.returncode else ""
        except subprocess.TimeoutExpired:
            reason = f"no response within {MLFLOW_SECONDS:g} s"
    if reason:
        raise TxlError(
            f"{page} is written, but MLflow does not have it: {reason}. Check the server "
            "(credentials: MLFLOW_TRACKING_URI), and run the command again"
        )


def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN...]",
            help="Run directories. Default: those below runs/.",
            parser=path_argument,
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what runs are doing: step, loss, speed, time left, newest checkpoint, last error, MLflow.

    A run is running, starting, ended, stopped (on request), failed, or lost (no last word in its
    log). Reads files only, also those of a run on another host that shares the storage: then it
    takes up to 15 seconds to see whether the ranks live.

    Example: txl status runs/quickstart
    """
    from txl_dist.analysis.run_status import (
        SILENT_SECONDS,
        find_runs,
        read_status,
        status_lines,
    )

    def wait(silent: Sequence[Path]) -> None:
        names = ", ".join(map(str, silent))
        line = f"watching the heartbeats of {names}, at most {SILENT_SECONDS:.0f} s"
        print(line, file=sys.stderr, flush=True)

    found = runs or find_runs(Path("runs"))
    statuses = read_status(found, wait=wait)
    if as_json:
        print(json.dumps({"runs": [each.to_json() for each in statuses]}))
        return
    for each in statuses:
        print("\n".join(status_lines(each)))
    if not statuses:
        print("no run in runs/; give run directories: txl status RUN")


# --- checkpoints ----------------------------------------------------------------------------------


@checkpoint_app.command("list")
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the complete checkpoints of a run, oldest first, and which are LATEST and BEST.

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
        row: dict[str, Any] = {"step": step, "path": str(directory.at(step))}
        row["pointers"] = pointers.get(step, [])
        try:
            manifest = load_checkpoint_manifest(directory.at(step))
            state = load_state(directory.at(step), manifest)
            score = scores.get(step)
            row |= {
                "bytes": sum(entry.bytes for entry in manifest.files.values()),
                "tokens": state.tokens,
                "num_ranks": manifest.num_ranks,
                "nats_per_token": score and score.nats_per_token,
            }
        except CheckpointError as error:  # One damaged checkpoint must not hide the others.
            row["damage"] = str(error)
        rows.append(row)
    if as_json:
        print(json.dumps({"run": str(run), "checkpoints": rows}))
        return
    for row in rows:
        nats = row.get("nats_per_token")
        summary = row.get("damage") or (
            f"{row['bytes']:>14,} bytes  {row['tokens']:>14,} tokens  {row['num_ranks']} ranks"
            + ("" if nats is None else f"  validation loss {nats:.4f}")
        )
        print("  ".join([f"{row['path']}  {summary}", *row["pointers"]]))
    if not rows:
        print(f"{run} has no complete checkpoint yet")


@checkpoint_app.command()
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


# --- tracking -------------------------------------------------------------------------------------


@track_app.command("sync")
def sync(
    run: Run,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Give up after this time.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Deliver to MLflow what a run has not delivered: metrics, settings and how it ended.

    For a run that has ended; one that is training delivers by itself. Points that MLflow has are
    not sent again, so it can be repeated. The copy of a run directory gets its own MLflow run.

    Example: txl track sync runs/quickstart
    """
    from txl_dist.config.redaction import HIDDEN
    from txl_dist.tracking.process import EXIT_UNDELIVERED
    from txl_dist.tracking.tracker import (
        LOG,
        REQUEST,
        STATE,
        TrackingRequest,
        TrackingState,
        child_environment,
    )

    request = TrackingRequest.load(run / REQUEST)
    if request is None:
        raise ConfigError(
            f"{run} has no {REQUEST}: it is not a run directory, or its run was not tracked "
            "(tracking.enabled). Give the `directory` of a config that `txl train` has run"
        )
    if HIDDEN in (request.server or "") and "MLFLOW_TRACKING_URI" not in os.environ:
        raise ConfigError(
            f"{run} was tracked at {request.server}, whose credentials are not stored. Give them: "
            "MLFLOW_TRACKING_URI=URI txl track sync RUN"
        )
    command = [sys.executable, "-m", "txl_dist.tracking.sender", str(run), "--sync"]
    command += ["--flush-seconds", str(timeout_seconds)]
    with running(f"delivering {run} to MLflow", quiet=as_json):
        done = subprocess.run(
            command, capture_output=True, text=True, env=child_environment(), check=False
        )
    state = TrackingState.load(run / STATE)
    if done.returncode or state is None or not state.delivered:
        reason = next(iter(done.stderr.strip().splitlines()), "no response")
        is_late = done.returncode == EXIT_UNDELIVERED
        raise TxlError(
            f"{run}: MLflow does not have everything"
            f"{f' after {timeout_seconds:g} s' if is_late else ''}: {reason}. The metrics are in "
            f"{run / 'metrics.jsonl'}. If the run is training, it delivers by itself (see "
            f"{run / LOG}); else check the server, and run the command again"
        )
    content = {"run": str(run), "mlflow_run_id": state.run_id, "status": state.status}
    text = f"MLflow run {state.run_id} has all metrics of {run} (status: {state.status})"
    print_result({**content, "delivered": True}, text, as_json=as_json)


# --- import and export ----------------------------------------------------------------------------

Out = Annotated[
    Path,
    typer.Option(help="New or empty directory to write.", parser=path_argument),
]


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A TransfoXL directory of transformers, or a state dict of the paper's code as "
            ".npz, with its constructor arguments as config_json.",
            parser=path_argument,
        ),
    ],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Convert weights of other systems: write model.safetensors and config.json.

    No code in the source is executed.

    Example: txl import downloads/transfo-xl-wt103 --out models/wt103
    """
    from txl_dist.convert import require_source

    require_source(source)  # before torch is imported
    from txl_dist.convert.other_programs import read_model
    from txl_dist.convert.stored_model import write_exported

    model, kind = read_model(source)
    write_exported(out, model, tokenizer=None)
    _print_model({"source": str(source), "format": kind}, out, model, as_json=as_json)


def export(
    checkpoint: SavedCheckpoint,
    out: Out,
    format_: Annotated[
        Literal["txl", "hf"],
        typer.Option(
            "--format",
            help="`txl`: weights, config and tokenizer. `hf`: also a model card and one Python "
            "file that runs the model with torch alone, as model hubs expect.",
        ),
    ] = "txl",
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="With `hf`: a result of txl eval --json for the card; can be repeated. Default: "
            "all results of these weights that txl eval has kept in the run.",
            parser=path_argument,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write model.safetensors, config.json and tokenizer.json of a checkpoint, for txl or others.

    If the run averaged its weights (optimizer.averaging), the average is written.

    Example: txl export runs/quickstart --out models/quickstart
    """
    if scores and format_ != "hf":
        raise ConfigError("--scores is for the model card of --format hf; add it")
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.reader import load_model
    from txl_dist.convert.stored_model import Reading, write_exported

    path = resolve_checkpoint(checkpoint)
    model, tokenizer, manifest = load_model(path)
    # How the model read its training text: txl eval and txl generate take it as their default.
    reading = Reading(tgt_len=manifest.segment_len, reset=manifest.run["data.reset"])
    if format_ == "hf":
        from txl_dist.convert.hub import export_for_hub

        export_for_hub(out, path, model, tokenizer, reading, scores=scores or ())
    else:
        write_exported(out, model, tokenizer, reading)
    _print_model({"source": str(path), "format": "checkpoint"}, out, model, as_json=as_json)


def _print_model(
    origin: dict[str, str], out: Path, model: "TransformerXL", *, as_json: bool
) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    text = f"{out}: {num_parameters:,} parameters, from {origin['source']} ({origin['format']})"
    content = {**origin, "out": str(out), "parameters": num_parameters}
    print_result(content, text, as_json=as_json)
