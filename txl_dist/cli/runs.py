"""What runs do and have written: `txl status`, `report`, `checkpoint`, `track` and `job`.

`cluster/jobs.py` has the client of `txl job`, which is found by name: this package must not import
Ray.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import typer

from data_pipeline.errors import counted
from data_pipeline.system.files import is_locked, write_file
from data_pipeline.system.path_kind import PathKind, kind_of
from txl_dist.cli.options import (
    AsJson,
    Run,
    SavedCheckpoint,
    file_argument,
    note,
    path_argument,
    print_result,
    running,
)
from txl_dist.errors import CheckpointError, ConfigError, TxlError

checkpoint_app = typer.Typer(help="List and verify checkpoints.", no_args_is_help=True)
track_app = typer.Typer(help="Tracking of runs in MLflow.", no_args_is_help=True)
job_app = typer.Typer(
    help="Run txl commands on a Ray cluster; watch and stop them.", no_args_is_help=True
)

SYNC_SECONDS = 600.0
MLFLOW_SECONDS = 120.0
"""For the import of mlflow."""


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
            parser=file_argument,
        ),
    ] = None,
) -> None:
    """Write one HTML page about a run, or about several.

    It has curves, scores, wall time and events. Of several runs: curves over each other, settings
    that differ, scores and goodput side by side. The page needs no other file and no network. The
    runs may be in progress.

    Example: txl report runs/quickstart
    """
    from txl_dist.analysis.run_report import read_run, run_page

    records = [read_run(run) for run in runs]
    path = out or runs[0].parent / "comparison.html"
    if out is None and len(runs) == 1:
        path = runs[0] / "report.html"
    write_file(path, run_page(records).encode())
    print(f"wrote {path}; open it in a browser")


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
    """Say what runs are doing.

    Prints step, loss, speed, time left, newest checkpoint, the error of a failed run, and MLflow's
    page. A run is running, starting, ended, stopped (on request), failed, or lost (without a last
    word). Reads files only, also those of a run on another host that shares the storage: then
    it takes up to 15 seconds to see whether the ranks live.

    Example: txl status runs/quickstart
    """
    from txl_dist.analysis.run_status import find_runs, read_status, status_lines

    with running("watching the heartbeats of runs, at most 15 s"):
        statuses = read_status(runs or find_runs(Path("runs")))
    if as_json:
        print(json.dumps({"runs": [each.to_json() for each in statuses]}))
        return
    for each in statuses:
        print("\n".join(status_lines(each)))
    if not statuses:
        print("no run in runs/; give run directories: txl status RUN")


# --- txl checkpoint -------------------------------------------------------------------------------


@checkpoint_app.command("list")
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the complete checkpoints of a run, oldest first.

    Example: txl checkpoint list runs/quickstart
    """
    from txl_dist.checkpoint.directory import POINTERS, CheckpointDirectory
    from txl_dist.checkpoint.manifest import load_checkpoint_manifest
    from txl_dist.training.scores import ScoreTable
    from txl_dist.training.state import load_state

    directory = CheckpointDirectory(run)
    if (kind := kind_of(run)) is not PathKind.RUN:
        raise CheckpointError(f"{run} is {kind}; give a run directory")
    pointed = {name: directory.pointer(name) for name in POINTERS}
    scores, rows = ScoreTable(directory, is_due=lambda step: False), []
    for step in directory.steps():
        path = directory.at(step)
        pointers = [name for name in POINTERS if pointed[name] == step]
        row: dict[str, Any] = {"step": step, "path": str(path), "pointers": pointers}
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


@checkpoint_app.command()
def verify(checkpoint: SavedCheckpoint, as_json: AsJson = False) -> None:
    """Hash every file and compare it with the manifest. Damage is listed; exit code 4.

    Example: txl checkpoint verify runs/quickstart
    """
    from txl_dist.checkpoint.directory import resolve_checkpoint
    from txl_dist.checkpoint.tensors import verify_checkpoint

    path = resolve_checkpoint(checkpoint)
    manifest = verify_checkpoint(path)
    size = sum(entry.bytes for entry in manifest.files.values())
    content = {"path": str(path), "step": manifest.step, "bytes": size}
    text = f"{path}: complete, {len(manifest.files)} files, {size:,} bytes, all hashes match"
    print_result(content, text, as_json=as_json)


# --- txl track ------------------------------------------------------------------------------------


@track_app.command("sync")
def sync(run: Run) -> None:
    """Deliver to MLflow what a run has not delivered.

    Metrics, settings, datasets, and scores, also those of txl eval, for 10 minutes at most. For
    a run that has ended; one that is training delivers by itself. Points that MLflow has are not
    sent again, so it can be repeated. The copy of a run directory gets its own MLflow run.

    Example: txl track sync runs/quickstart
    """
    from txl_dist.tracking.process import run_sender
    from txl_dist.tracking.tracker import (
        LOCK,
        LOG,
        REQUEST,
        STATE,
        TrackingRequest,
        TrackingState,
        UnavailableError,
        server_of,
    )
    from txl_dist.training.spec import live_runs

    request = TrackingRequest.load(run / REQUEST)
    if request is None:
        raise ConfigError(
            f"{run} has no {REQUEST}: it is not a run directory, or its run was not tracked "
            "(tracking.enabled). Give the `directory` of a config that `txl train` has run"
        )
    try:
        server_of(request.server, run)
    except UnavailableError:
        raise ConfigError(
            f"{run} was tracked at {request.server}, whose credentials are not stored. Give them: "
            "MLFLOW_TRACKING_URI=URI txl track sync RUN"
        ) from None
    if is_locked(run / LOCK):
        if live_runs([run]):
            raise TxlError(
                f"{run} has not ended, and delivers to MLflow by itself (see {run / LOG}). Run "
                "this command again when txl status says that it has"
            )
        note(
            f"another process still delivers {run} to MLflow; waiting up to {SYNC_SECONDS:.0f} s "
            f"for its end (see {run / LOG}). Ctrl-C ends the wait"
        )
    words = (str(run), "--flush-seconds", str(SYNC_SECONDS))
    with running(f"delivering {run} to MLflow"):
        reason = run_sender(*words, timeout_seconds=SYNC_SECONDS + MLFLOW_SECONDS)
    state = TrackingState.load(run / STATE)
    if reason or state is None or not state.delivered:
        raise TxlError(
            f"{run}: MLflow does not have everything: {reason or 'training has begun again'}. The "
            f"metrics are in {run / 'metrics.jsonl'}. If the run is training, it delivers by "
            f"itself (see {run / LOG}); else check the server, and run the command again"
        )
    print(f"MLflow run {state.run_id} has all metrics of {run} (status: {state.status})")


# --- txl job --------------------------------------------------------------------------------------

# Ids, logs and JSON are on standard output, the rest on standard error.
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
Address = Annotated[
    str,
    typer.Option(
        metavar="URL", help="Dashboard of the cluster's head.", envvar="RAY_API_SERVER_ADDRESS"
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Its id, as submit and list print it.")]


@job_app.command(context_settings={"allow_interspersed_args": False})
def submit(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- train|prepare|eval ARGS...", help="The txl command."),
    ],
    address: Address = DEFAULT_ADDRESS,
    root: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Absolute path on the cluster, seen by all nodes: relative paths of data, runs "
            "and checkpoints begin there.",
            show_default="this directory",
            envvar="TXL_JOB_ROOT",
        ),
    ] = None,
    python: Annotated[str, typer.Option(help="Python of the cluster's nodes.")] = "python",
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Show the output until the job ends, and exit with its code. Ctrl-C leaves the "
            "job running.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a txl command on a cluster. The config of a training run is sent with it. Submitting a
    run twice is safe: while it runs, the second job fails; afterwards it resumes the run.

    Example: txl job submit --follow -- train quickstart --ranks 8
    """
    request = resolve_name("cluster.jobs:plan_job")(
        command,
        program=context.find_root().command,
        root=root or str(Path.cwd()),
        python=python,
    )
    with _cluster(address) as client:
        job = client.submit(request)
        note(f"Watch: txl job logs -f {job.id}. Stop: txl job stop {job.id}")
        if follow:
            _follow(client, job.id, as_json=as_json)
        print_result(asdict(job), job.id, as_json=as_json)


@job_app.command("status")
def job_status(job: JobId, address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Show the state of a job, and of a failed one its error.

    Example: txl job status txl-train-quickstart-0123abcd
    """
    with _cluster(address) as client:
        found = client.job(job)
    if found.state == "failed" and not as_json:
        note(found.message)
    print_result(asdict(found), _summary(found), as_json=as_json)


@job_app.command()
def logs(
    job: JobId,
    address: Address = DEFAULT_ADDRESS,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Go on until the job ends or Ctrl-C, and exit with its code."
        ),
    ] = False,
) -> None:
    """Print the output of a job's txl command. Logs of all ranks are in the run directory.

    Example: txl job logs -f txl-train-quickstart-0123abcd
    """
    with _cluster(address) as client:
        if follow:
            _follow(client, job)
        print(client.get_job_logs(job), end="")


@job_app.command()
def stop(
    job: JobId,
    address: Address = DEFAULT_ADDRESS,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")] = False,
) -> None:
    """Ask a job to stop. A training run saves a checkpoint first and ends with exit code 75.

    Example: txl job stop txl-train-quickstart-0123abcd --wait
    """
    with _cluster(address) as client:
        if not client.stop_job(job):
            print(f"already ended: {_summary(client.job(job))}")
            return
        note(f"asked {job} to stop; a training run saves first, then ends with exit code 75")
        if wait:
            print(_summary(client.wait(job)))


@job_app.command("list")
def list_jobs(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """List the txl jobs that the cluster knows, oldest first. A restarted head node lists none.

    Example: txl job list --address http://127.0.0.1:8265
    """
    with _cluster(address) as client:
        jobs = client.jobs()
    width = max((len(job.id) for job in jobs), default=0)
    lines = [
        f"{job.id:{width}}  {job.state:9}  {'' if job.exit_code is None else job.exit_code:>3}  "
        f"{job.command}"
        for job in jobs
    ]
    content = {"jobs": [asdict(job) for job in jobs]}
    print_result(content, "\n".join(lines) or "no txl jobs", as_json=as_json)


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    with resolve_name("cluster.jobs:ray_jobs")(address) as client:
        if client.accepts_anyone:
            note(
                "warning: this cluster accepts jobs without a token, from anyone who can reach it. "
                "Start Ray with RAY_AUTH_MODE=token (ray get-auth-token --generate)"
            )
        yield client


def _follow(client: Any, job_id: str, *, as_json: bool = False) -> NoReturn:
    """Show the output of a job until it ends, and exit with the code of its txl command."""
    output = sys.stderr if as_json else sys.stdout  # with --json only the result goes there
    try:
        job = client.wait(job_id, lambda text: print(text, end="", file=output, flush=True))
    except KeyboardInterrupt:
        note(f"\n{job_id} keeps running")
        sys.exit(130)  # as in a shell: 128 + SIGINT
    if as_json:
        print(json.dumps(asdict(job)))
    note(_summary(job))
    sys.exit(job.exit_code)


def _summary(job: Any) -> str:
    advice = {
        "stopped": "; submit the same command to resume",
        "failed": f"; output: txl job logs {job.id}",
    }
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return f"{job.id}: {job.state}{code}{advice.get(job.state, '')}"
