"""What `txl job` prints: ids, logs and JSON on standard output, the rest on standard error."""

import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txl_dist.launch.jobs import Job, JobClient, JobRequest


def print_plan(request: "JobRequest", *, as_json: bool) -> None:
    if as_json:
        plan = {"entrypoint": request.entrypoint, "environment": dict(request.environment)}
        print(json.dumps({"name": request.name, **plan}))
        return
    print(f"job:     {request.name}-N (N: number of the attempt)")
    print(f"command: {request.command}")
    print(f"root:    {request.root}, which must exist on all nodes")
    print(f"runs as: {request.entrypoint}")


def summary(job: "Job", client: "JobClient") -> str:
    advice = {
        "stopped": "; submit the same command to resume",
        "failed": f"; output: txl job logs {job.id} {address_option(client)}",
    }
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return f"{job.id}: {job.state}{code}, {duration(job)}{advice.get(job.state, '')}"


def duration(job: "Job") -> str:
    if job.start_seconds is None:
        return "0 s"
    seconds = int((job.end_seconds or time.time()) - job.start_seconds)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds % 60:02} s"


def next_commands(client: "JobClient", job_id: str) -> str:
    at = address_option(client)
    return f"Watch: txl job logs -f {job_id} {at}. Stop: txl job stop {job_id} {at}"


def address_option(client: "JobClient") -> str:
    return f"--address {client.url}"


def note(text: str) -> None:
    """For people, on standard error: standard output has ids, logs of jobs, and JSON."""
    print(text, file=sys.stderr)


def note_part(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def write(text: str) -> None:
    print(text, end="", flush=True)
