"""The findings for people: a table on a terminal, plain lines elsewhere; or one JSON object."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from txl_dist.doctor.finding import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
_MAX_NODES = 4
"""A line names at most this many nodes with the same finding."""


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """One object: whether all is well, and all findings."""
    fields = ("node", "check", "status", "found", "expected", "advice")
    rows = [{name: asdict(finding)[name] for name in fields} for finding in findings]
    return {
        "ok": not num_problems(findings),
        "num_problems": num_problems(findings),
        "findings": rows,
    }


def num_problems(findings: Sequence[Finding]) -> int:
    return sum(finding.status == "problem" for finding in findings)


def print_report(findings: Sequence[Finding]) -> None:
    """Print findings, those that several nodes share once, problems last."""
    grouped: dict[Finding, list[str]] = {}
    order = ("ok", "note", "problem")
    for finding in sorted(findings, key=lambda finding: order.index(finding.status)):
        grouped.setdefault(_without_node(finding), []).append(finding.node)
    if sys.stdout.isatty():
        _print_table(grouped)
    else:
        for finding, nodes in grouped.items():
            print(_line(finding, nodes))
    count = num_problems(findings)
    print("no problems found" if not count else f"{count} problem{'s' * (count > 1)} found")


def _without_node(finding: Finding) -> Finding:
    return Finding(
        status=finding.status,
        check=finding.check,
        found=finding.found,
        expected=finding.expected,
        advice=finding.advice,
    )


def _line(finding: Finding, nodes: Sequence[str]) -> str:
    parts = [f"{finding.status:<8} {finding.check:<9} {_listed(nodes)}: {finding.found}"]
    parts += [f"expected: {finding.expected}"] if finding.expected else []
    parts += [f"do: {finding.advice}"] if finding.advice else []
    return " | ".join(parts)


def _print_table(grouped: dict[Finding, list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for title in ("status", "check", "node", "found", "expected", "what to do"):
        table.add_column(title, overflow="fold")
    for finding, nodes in grouped.items():
        texts = (finding.check, _listed(nodes), finding.found, finding.expected, finding.advice)
        table.add_row(Text(finding.status, _STYLES[finding.status]), *map(Text, texts))
    Console().print(table)


def _listed(nodes: Sequence[str]) -> str:
    if len(nodes) <= _MAX_NODES:
        return ", ".join(nodes)
    return f"{', '.join(nodes[:_MAX_NODES])} and {len(nodes) - _MAX_NODES} more"
