"""`txl job`: run txl commands on a Ray cluster as Ray Jobs, and watch and stop them from here.

Ids, logs and JSON are on standard output, the rest on standard error. `cluster/jobs.py` has the
client, which is found by name: this package must not import Ray.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import typer

from txl_dist.cli.options import AsJson, print_result

INTERRUPTED_EXIT_CODE = 130
"""Ctrl-C while following a job, as in a shell: 128 + SIGINT. The job goes on."""

app = typer.Typer(
    help="Submit txl commands to a Ray cluster; watch and stop them.",
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
        metavar="JOB",
        help="Id of one attempt, or the name of a run, with or without its digest: its newest "
        "attempt.",
    ),
]


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    context: typer.Context,
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
        Path,
        typer.Option(
            metavar="DIR",
            help="Its files (configs) are sent to the cluster, without those of .gitignore and "
            ".rayignore.",
        ),
    ] = Path(),
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent; contact no cluster.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a txl command on a cluster. Submitting a run twice is safe: while it runs, the second
    submission is refused (or follows it, with --follow); afterwards it resumes the run.

    Example: txl job submit --follow -- train quickstart --ranks 8
    """
    request = resolve_name("cluster.jobs:plan_job")(
        command,
        program=context.find_root().command,
        root=root or str(Path.cwd()),
        working_dir=working_dir,
        environment=env or (),
        python=python,
    )
    if dry_run:
        plan = {"name": request.name, "entrypoint": request.entrypoint}
        content = {**plan, "environment": dict(request.environment)}
        print_result(content, f"{request.command}\n{request.entrypoint}", as_json=as_json)
        return
    client = _connect(address)
    job, was_running = client.submit(request, attach=follow)
    if was_running:
        _note(f"{job.id} is already running; following it")
    if follow:
        _follow(client, job.id, as_json=as_json)
    print_result(asdict(job), job.id, as_json=as_json)
    _note(_next_commands(client, job.id))


@app.command()
def status(job: JobId, address: Address = None, as_json: AsJson = False) -> None:
    """Show the state of a job, and of a failed one its error.

    Example: txl job status txl-train-quickstart-0123abcd
    """
    client = _connect(address)
    found = client.find(job)
    if found.state == "failed" and not as_json:
        _note(found.message)
    print_result(asdict(found), _summary(found, client), as_json=as_json)


@app.command()
def logs(
    job: JobId,
    address: Address = None,
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
    client = _connect(address)
    found = client.find(job)
    if follow:
        _follow(client, found.id)
    print(client.logs(found.id), end="")


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
    found = client.find(job)
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
    width = max((len(job.id) for job in jobs), default=0)
    lines = [
        f"{job.id:{width}}  {job.state:7}  {'' if job.exit_code is None else job.exit_code:>3}  "
        f"{job.duration:>9}  {job.command}"
        for job in jobs
    ]
    content = {"jobs": [asdict(job) for job in jobs]}
    print_result(content, "\n".join(lines) or "no txl jobs", as_json=as_json)


def _connect(address: str | None) -> Any:
    client = resolve_name("cluster.jobs:RayJobs")(None if address == "auto" else address)
    if not client.needs_token:
        _note(
            f"warning: {client.url} accepts jobs without a token, from anyone who can reach it. "
            "Start Ray with RAY_AUTH_MODE=token (ray get-auth-token --generate); txl doctor checks"
        )
    return client


def _follow(client: Any, job_id: str, *, as_json: bool = False) -> NoReturn:
    """Show the output of a job until it ends, and exit with the code of its txl command."""
    output = sys.stderr if as_json else sys.stdout  # with --json only the result goes there
    try:
        _note(_next_commands(client, job_id))
        job = client.wait(job_id, lambda text: print(text, end="", file=output, flush=True))
    except KeyboardInterrupt:
        _note(f"\n{job_id} keeps running. {_next_commands(client, job_id)}")
        sys.exit(INTERRUPTED_EXIT_CODE)
    if as_json:
        print(json.dumps(asdict(job)))
    _note(_summary(job, client))
    sys.exit(int(job.is_ended) if job.exit_code is None else job.exit_code)


def _summary(job: Any, client: Any) -> str:
    advice = {
        "stopped": "; submit the same command to resume",
        "failed": f"; output: txl job logs {job.id} --address {client.url}",
    }
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return f"{job.id}: {job.state}{code}, {job.duration}{advice.get(job.state, '')}"


def _next_commands(client: Any, job_id: str) -> str:
    at = f"--address {client.url}"
    return f"Watch: txl job logs -f {job_id} {at}. Stop: txl job stop {job_id} {at}"


def _note(text: str) -> None:
    """Print for people."""
    print(text, file=sys.stderr)
