"""`txl job`: run txl commands on a Ray cluster as Ray Jobs, and watch and stop them from here.

Ids, logs and JSON are on standard output, the rest on standard error. `cluster/jobs.py` has the
client, which is found by name: this package must not import Ray.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import typer

from txl_dist.cli.options import AsJson, print_result

DEFAULT_ADDRESS = "http://127.0.0.1:8265"

app = typer.Typer(
    help="Run txl commands on a Ray cluster; watch and stop them.", no_args_is_help=True
)
_note = partial(typer.echo, err=True)  # what is for people
Address = Annotated[
    str,
    typer.Option(
        metavar="URL", help="Dashboard of the cluster's head.", envvar="RAY_API_SERVER_ADDRESS"
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Its id, as submit and list print it.")]


@app.command(context_settings={"allow_interspersed_args": False})
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
        _note(f"Watch: txl job logs -f {job.id}. Stop: txl job stop {job.id}")
        if follow:
            _follow(client, job.id, as_json=as_json)
        print_result(asdict(job), job.id, as_json=as_json)


@app.command()
def status(job: JobId, address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Show the state of a job, and of a failed one its error.

    Example: txl job status txl-train-quickstart-0123abcd
    """
    with _cluster(address) as client:
        found = client.job(job)
    if found.state == "failed" and not as_json:
        _note(found.message)
    print_result(asdict(found), _summary(found), as_json=as_json)


@app.command()
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


@app.command()
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
        _note(f"asked {job} to stop; a training run saves first, then ends with exit code 75")
        if wait:
            print(_summary(client.wait(job)))


@app.command("list")
def list_(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
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
            _note(
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
        _note(f"\n{job_id} keeps running")
        sys.exit(130)  # as in a shell: 128 + SIGINT
    if as_json:
        print(json.dumps(asdict(job)))
    _note(_summary(job))
    sys.exit(job.exit_code)


def _summary(job: Any) -> str:
    advice = {
        "stopped": "; submit the same command to resume",
        "failed": f"; output: txl job logs {job.id}",
    }
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return f"{job.id}: {job.state}{code}{advice.get(job.state, '')}"
