"""`txl job`: run txl commands on a Ray cluster as Ray Jobs, and watch and stop them from here."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from txl_dist.cli.options import AsJson
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.cli.job_request import Job, JobClient, JobRequest

INTERRUPTED_EXIT_CODE = 130
"""Ctrl-C while following a job, as in a shell: 128 + SIGINT. The job goes on."""

app = typer.Typer(
    help="Submit txl commands to a Ray cluster as jobs, and watch and stop them.",
    no_args_is_help=True,
)

Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL|ADDRESS|auto",
        help="Dashboard of the cluster (http://HOST:8265) or address of its head (HOST:6379). "
        "Default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or the cluster on this machine.",
        show_default=False,
    ),
]
JobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Id of a job, or its name, with or without digest: the newest."
    ),
]


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- train|prepare|eval ARGS...", help="The txl command."),
    ],
    address: Address = None,
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
    working_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Its files (configs) are sent to the cluster.")
    ] = Path(),
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Leave out these files too; as in .gitignore, can be repeated."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Environment variable of the job; no secrets. Can be repeated.",
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
    wait: Annotated[bool, typer.Option("--wait", help="As --follow, without the output.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent; contact no cluster.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a txl command on a cluster. Submitting a run twice is safe: while it runs, the second
    submission is refused (or follows it, with --follow); afterwards it resumes the run.

    Example: txl job submit --follow -- train quickstart --ranks 8
    """
    from txl_dist.cli.job_request import describe_package, job_client, plan_job, require_size

    request = plan_job(
        command,
        root=root or str(Path.cwd()),
        working_dir=working_dir,
        environment=_environment(env or []),
        python=python,
        exclude=exclude or (),
    )
    sizes = job_client().package(request)
    _note(f"package: {describe_package(sizes)}")
    require_size(sizes)
    if dry_run:
        _print_plan(request, as_json=as_json)
        return
    client = _connect(address)
    _note(f"upload to {client.url}, unless the files are there")
    job = _submit(client, request, attach=follow or wait)
    if follow or wait:
        sys.exit(_wait(client, job.id, follow=follow, as_json=as_json))
    print(json.dumps(asdict(job)) if as_json else job.id)
    _note(_next_commands(client, job.id))


@app.command()
def status(
    job: JobId,
    address: Address = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end, and exit with the job's exit code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a job; with --wait, exit with the exit code of its txl command.

    Example: txl job status txl-train-quickstart-0123abcd --wait
    """
    client = _connect(address)
    found = _find(client, job)
    if wait:
        sys.exit(_wait(client, found.id, follow=False, as_json=as_json))
    found = client.job(found.id)
    if found.state == "failed" and not as_json:
        _note(found.message)
    print(json.dumps(asdict(found)) if as_json else _summary(found, client))


@app.command()
def logs(
    job: JobId,
    address: Address = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends or Ctrl-C.")
    ] = False,
) -> None:
    """Print the output of a job's txl command. Logs of all ranks are in the run directory.

    Example: txl job logs -f txl-train-quickstart-0123abcd
    """
    client = _connect(address)
    found = _find(client, job)
    if not follow:
        print(client.logs(found.id), end="")
        return
    try:
        client.wait(found.id, _write)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)


@app.command()
def stop(
    job: JobId,
    address: Address = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")] = False,
) -> None:
    """Ask a job to stop. A training run saves a checkpoint first and ends with exit code 75.

    Example: txl job stop txl-train-quickstart-0123abcd --wait
    """
    client = _connect(address)
    found = _find(client, job)
    if not client.stop(found.id):
        print(f"already ended: {_summary(client.job(found.id), client)}")
        return
    _note(f"asked {found.id} to stop; a training run saves first, then ends with exit code 75")
    if wait:
        print(_summary(client.wait(found.id), client))


@app.command("list")
def list_(address: Address = None, as_json: AsJson = False) -> None:
    """List the txl jobs that the cluster knows, oldest first. A restarted head node lists none.

    Example: txl job list --address http://127.0.0.1:8265
    """
    jobs = _connect(address).jobs()
    if as_json:
        print(json.dumps({"jobs": [asdict(job) for job in jobs]}))
        return
    width = max((len(job.id) for job in jobs), default=0)
    for job in jobs:
        code = "" if job.exit_code is None else str(job.exit_code)
        print(f"{job.id:{width}}  {job.state:7}  {code:>3}  {_duration(job):>9}  {job.command}")
    if not jobs:
        print("no txl jobs")


def _connect(address: str | None) -> "JobClient":
    from txl_dist.cli.job_request import job_client

    client = job_client()(None if address == "auto" else address)
    if not client.needs_token:
        _note(
            f"warning: {client.url} accepts jobs without a token, from anyone who can reach it. "
            "Start Ray with RAY_AUTH_MODE=token (ray get-auth-token --generate); txl doctor checks"
        )
    return client


def _submit(client: "JobClient", request: "JobRequest", *, attach: bool) -> "Job":
    """Start the next attempt, or attach to the one that is running."""
    from txl_dist.cli.job_request import JobExistsError, attempts_of, next_attempt_id

    attempts = attempts_of(request.name, client.jobs())
    running = next((job for job in reversed(attempts) if not job.is_ended), None)
    if running is None:
        job_id = next_attempt_id(request.name, attempts)
        try:
            client.submit(request, job_id)
        except JobExistsError:  # another client submitted it first
            running = client.job(job_id)
        else:
            return client.job(job_id)
    if attach and running.command == request.command:
        _note(f"{running.id} is already running; following it")
        return running
    difference = "" if running.command == request.command else f" ({running.command})"
    at = _address_option(client)
    raise ConfigError(
        f"this run is already running as job {running.id}{difference}. To watch it: txl job logs "
        f"-f {running.id} {at}. To start it again: txl job stop --wait {running.id} {at}, then "
        "submit"
    )


def _wait(client: "JobClient", job_id: str, *, follow: bool, as_json: bool) -> int:
    """Wait for the end of a job; returns the exit code of its txl command."""
    try:
        if follow:
            _note(_next_commands(client, job_id))
        # With --json only the result goes to standard output.
        write = partial(_write, file=sys.stderr) if as_json else _write
        job = client.wait(job_id, write if follow else None)
    except KeyboardInterrupt:
        _note(f"\n{job_id} keeps running. {_next_commands(client, job_id)}")
        return INTERRUPTED_EXIT_CODE
    if as_json:
        print(json.dumps(asdict(job)))
    elif not follow and job.state == "failed":
        _note(job.message)
    _note(_summary(job, client))
    return int(job.is_ended) if job.exit_code is None else job.exit_code


def _find(client: "JobClient", name: str) -> "Job":
    """The newest attempt of a run, or one attempt by its id."""
    from txl_dist.cli.job_request import attempts_of

    if attempts := attempts_of(name, client.jobs()):
        return attempts[-1]
    raise ConfigError(
        f"{client.url} knows no job {name}: txl job list {_address_option(client)} shows those "
        "that it knows. After a restart of the head its jobs are unknown; submit the same command: "
        "a run resumes"
    )


def _environment(settings: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` options."""
    environment: dict[str, str] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(f"--env {name}: write NAME=VALUE")
        environment[name] = value
    return environment


# --- output: ids, logs and JSON on standard output, the rest on standard error --------------------


def _print_plan(request: "JobRequest", *, as_json: bool) -> None:
    if as_json:
        plan = {"entrypoint": request.entrypoint, "environment": dict(request.environment)}
        print(json.dumps({"name": request.name, **plan}))
        return
    print(f"job:     {request.name}-N (N: number of the attempt)")
    print(f"command: {request.command}")
    print(f"root:    {request.root}, which must exist on all nodes")
    print(f"runs as: {request.entrypoint}")


def _summary(job: "Job", client: "JobClient") -> str:
    advice = {
        "stopped": "; submit the same command to resume",
        "failed": f"; output: txl job logs {job.id} {_address_option(client)}",
    }
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return f"{job.id}: {job.state}{code}, {_duration(job)}{advice.get(job.state, '')}"


def _duration(job: "Job") -> str:
    now = time.time()
    return str(timedelta(seconds=int((job.end_seconds or now) - (job.start_seconds or now))))


def _next_commands(client: "JobClient", job_id: str) -> str:
    at = _address_option(client)
    return f"Watch: txl job logs -f {job_id} {at}. Stop: txl job stop {job_id} {at}"


def _address_option(client: "JobClient") -> str:
    return f"--address {client.url}"


def _note(text: str) -> None:
    """For people, on standard error: standard output has ids, logs of jobs, and JSON."""
    print(text, file=sys.stderr)


def _write(text: str, *, file: TextIO | None = None) -> None:
    print(text, end="", file=file, flush=True)
