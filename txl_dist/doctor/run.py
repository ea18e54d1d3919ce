"""Run checks in parallel, each with a time limit.

A file system or a server that does not respond can block a thread without limit. So each check has
a daemon thread, which is abandoned after the limit and does not keep the process alive.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from data_pipeline.errors import printable
from txl_dist.config.redaction import redact
from txl_dist.doctor.finding import Finding, problem

Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Mapping[str, Check], *, node: str, limit_seconds: float) -> list[Finding]:
    """The findings of all checks, in their order, after at most about `limit_seconds`."""
    results: dict[str, list[Finding]] = {}

    def run(name: str, check: Check) -> None:
        try:
            results[name] = list(check())
        except Exception as error:  # one broken check must not hide the findings of the others
            results[name] = [failed_check(error)]

    threads = {
        name: threading.Thread(target=run, args=(name, check), name=f"check {name}", daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + limit_seconds
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            results[name] = [no_result(limit_seconds)]
    return [
        # Texts of servers and of libraries: no control characters, no credentials.
        replace(finding, check=name, node=node, found=printable(redact(finding.found)))
        for name in checks
        for finding in results[name]
    ]


def failed_check(error: Exception) -> Finding:
    """The finding for a check that raised an unexpected error."""
    text = str(error).strip().partition("\n")[0]
    return problem(
        f"the check failed: {type(error).__name__}: {text}"[:500],
        expected="a check that runs to its end",
        advice="correct the cause named there; if it is in txl itself, report it",
    )


def no_result(limit_seconds: float) -> Finding:
    """The finding for a check that did not end in time."""
    return problem(
        f"no result after {limit_seconds:g} s",
        expected="a result in that time",
        advice="a file system or a server does not respond: check mounts (df, ls) and the network; "
        "for slow systems raise --time-limit",
    )
