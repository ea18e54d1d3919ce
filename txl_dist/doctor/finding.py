"""Finding: what one check found on one node, what was expected, and what to do.

`run_checks` runs checks in parallel, each with a time limit. A file system or a server that does
not respond can block a thread without limit. So each check has a daemon thread, which is abandoned
after the limit and does not keep the process alive.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from data_pipeline.errors import counted, printable
from txl_dist.config.redaction import redact

Status = Literal["ok", "note", "problem"]
"""A problem makes `txl doctor` fail; a note does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check. `run_checks` sets `check` and `node`."""

    status: Status
    found: str
    expected: str = ""
    advice: str = ""
    """The next step; "" if nothing needs to be done."""
    check: str = ""
    node: str = ""
    same_on_all: tuple[str, ...] = ()
    """What must be equal on all nodes."""


def ok(found: str, *, same_on_all: Sequence[str] = ()) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(status="ok", found=found, same_on_all=tuple(same_on_all))


def note(found: str, *, expected: str = "", advice: str) -> Finding:
    """Return a finding that prevents no run."""
    return Finding(status="note", found=found, expected=expected, advice=advice)


def problem(found: str, *, expected: str, advice: str) -> Finding:
    """Return a finding to repair before a run."""
    return Finding(status="problem", found=found, expected=expected, advice=advice)


Check = Callable[[], Iterable[Finding]]
LIMIT_SECONDS = 30.0
"""Time limit of every check."""


def run_checks(
    checks: Mapping[str, Check], *, node: str, limit_seconds: float = LIMIT_SECONDS
) -> list[Finding]:
    """Return the findings of all checks, in their order, after at most about `limit_seconds`."""
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
    """Return the finding for a check that raised an unexpected error."""
    text = str(error).strip().partition("\n")[0]
    return problem(
        f"the check failed: {type(error).__name__}: {text}"[:500],
        expected="a check that runs to its end",
        advice="correct the cause named there; if it is in txl itself, report it",
    )


def no_result(limit_seconds: float) -> Finding:
    """Return the finding for a check that did not end in time."""
    return problem(
        f"no result after {limit_seconds:g} s",
        expected="a result in that time",
        advice="a file system or a server does not respond: check mounts (df, ls) and the network",
    )


MAX_NODES = 4
"""A line names at most this many nodes with the same finding."""


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return one object: whether all is well, and all findings."""
    rows = [asdict(finding) for finding in findings]
    for row in rows:
        del row["same_on_all"]
    count = num_problems(findings)
    return {"ok": not count, "num_problems": count, "findings": rows}


def num_problems(findings: Sequence[Finding]) -> int:
    return sum(finding.status == "problem" for finding in findings)


def report(findings: Sequence[Finding]) -> str:
    """Return one line per finding, those that several nodes share once, problems last."""
    grouped: dict[Finding, list[str]] = {}
    order = ("ok", "note", "problem")
    for finding in sorted(findings, key=lambda finding: order.index(finding.status)):
        grouped.setdefault(replace(finding, node="", same_on_all=()), []).append(finding.node)
    lines = []
    for finding, nodes in grouped.items():
        listed = ", ".join(nodes[:MAX_NODES])
        listed += f" and {len(nodes) - MAX_NODES} more" * (len(nodes) > MAX_NODES)
        line = f"{finding.status:<8} {finding.check:<9} {listed}: {finding.found}"
        line += f" | expected: {finding.expected}" if finding.expected else ""
        lines.append(line + (f" | do: {finding.advice}" if finding.advice else ""))
    count = num_problems(findings)
    return "\n".join([*lines, f"{counted(count, 'problem') if count else 'no problems'} found"])
