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


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. `run_checks` sets `check` and `node`."""

    status: Literal["ok", "note", "problem"]
    """A problem makes `txl doctor` fail; a note does not."""
    found: str
    expected: str = ""
    advice: str = ""
    """The next step; "" if nothing needs to be done."""
    check: str = ""
    node: str = ""


Check = Callable[[], Iterable[Finding]]
LIMIT_SECONDS = 30.0
"""Time limit of every check."""


def run_checks(
    checks: Mapping[str, Check], *, node: str, limit_seconds: float = LIMIT_SECONDS
) -> list[Finding]:
    """Return the findings of all checks, in their order, after at most about `limit_seconds`."""
    too_late = failed_check(TimeoutError(f"no result after {limit_seconds:g} s"))
    results = {name: [too_late] for name in checks}

    def run(name: str, check: Check) -> None:
        try:
            results[name] = list(check())
        except Exception as error:  # one broken check must not hide the findings of the others
            results[name] = [failed_check(error)]

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [
        # Texts of servers and of libraries: no control characters, no credentials.
        replace(finding, check=name, node=node, found=printable(redact(finding.found)))
        for name in checks
        for finding in results[name]
    ]


def failed_check(error: Exception) -> Finding:
    """Return the finding for a check that raised an error, or did not end in time."""
    text = str(error).strip().partition("\n")[0]
    return Finding(
        "problem",
        f"{type(error).__name__}: {text}"[:500],
        expected="a check that ends without an error",
        advice="correct what is named there; if nothing responds, check mounts (df, ls), servers "
        "and the network; if the cause is in txl itself, report it",
    )


def num_problems(findings: Sequence[Finding]) -> int:
    return sum(finding.status == "problem" for finding in findings)


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return one object: whether all is well, and all findings."""
    count = num_problems(findings)
    rows = [asdict(finding) for finding in findings]
    return {"ok": not count, "num_problems": count, "findings": rows}


def report(findings: Sequence[Finding]) -> str:
    """Return one line per finding, those that several nodes share once, problems last."""
    nodes: dict[Finding, list[str]] = {}
    order = ("ok", "note", "problem")
    for finding in sorted(findings, key=lambda finding: order.index(finding.status)):
        nodes.setdefault(replace(finding, node=""), []).append(finding.node)
    lines = []
    for finding, names in nodes.items():
        line = f"{finding.status:<8} {finding.check:<9} {', '.join(names)}: {finding.found}"
        line += f" | expected: {finding.expected}" if finding.expected else ""
        lines.append(line + (f" | do: {finding.advice}" if finding.advice else ""))
    count = num_problems(findings)
    return "\n".join([*lines, f"{counted(count, 'problem') if count else 'no problems'} found"])
