"""Finding: what one check found on one node, what was expected, and what to do."""

from dataclasses import dataclass
from typing import Literal

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
    equal_on_all_nodes: str = ""
    """A value that must be the same on all nodes; "": none. See `comparison.py`."""


def ok(found: str, *, equal_on_all_nodes: str = "") -> Finding:
    """All is well."""
    return Finding(status="ok", found=found, equal_on_all_nodes=equal_on_all_nodes)


def note(found: str, *, expected: str = "", advice: str) -> Finding:
    """Something to know, which prevents no run."""
    return Finding(status="note", found=found, expected=expected, advice=advice)


def problem(found: str, *, expected: str, advice: str) -> Finding:
    """Something to repair before a run."""
    return Finding(status="problem", found=found, expected=expected, advice=advice)
