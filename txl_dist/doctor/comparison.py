"""Differences between nodes: values that must be equal, the clocks, and files that must be shared.

Pure functions of what the nodes reported.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from txl_dist.doctor.finding import Finding, note, ok, problem
from txl_dist.doctor.storage import UNSEEN, ProbeResult

ALL_NODES = "all nodes"
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0


def compare_values(findings: Sequence[Finding]) -> list[Finding]:
    """A problem for every node whose `equal_on_all_nodes` is not that of most nodes."""
    problems = []
    for check in {finding.check: None for finding in findings if finding.equal_on_all_nodes}:
        reported = [one for one in findings if one.check == check and one.equal_on_all_nodes]
        counts = Counter(finding.equal_on_all_nodes for finding in reported)
        most, _ = counts.most_common(1)[0]
        example = next(one for one in reported if one.equal_on_all_nodes == most)
        problems += [
            replace(
                problem(
                    finding.found,
                    expected=f"as on node {example.node}: {example.found}",
                    advice="make both nodes see the same directory, or copy the newer one there",
                ),
                check=check,
                node=finding.node,
            )
            for finding in reported
            if finding.equal_on_all_nodes != most
        ]
    return problems


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The clock of a node minus that of the machine of the command."""

    difference_seconds: float
    uncertainty_seconds: float
    """Half of the shortest round trip."""


def compare_clocks(readings: Mapping[str, ClockReading]) -> list[Finding]:
    """A problem for every clock that differs from the median clock."""
    in_order = sorted(readings.values(), key=lambda reading: reading.difference_seconds)
    middle = in_order[(len(in_order) - 1) // 2]
    findings = []
    largest = 0.0
    for node, reading in readings.items():
        difference = reading.difference_seconds - middle.difference_seconds
        largest = max(largest, abs(difference))
        uncertainty = reading.uncertainty_seconds + middle.uncertainty_seconds
        if abs(difference) - uncertainty > MAX_CLOCK_DIFFERENCE_SECONDS:
            direction = "ahead of" if difference > 0 else "behind"
            findings.append(
                replace(
                    problem(
                        f"the clock is {abs(difference):.1f} s {direction} the median of all nodes",
                        expected=f"at most {MAX_CLOCK_DIFFERENCE_SECONDS:g} s",
                        advice="start chrony or systemd-timesyncd on that node (timedatectl)",
                    ),
                    node=node,
                )
            )
    error = max(reading.uncertainty_seconds for reading in readings.values())
    fine = ok(f"the clocks differ by at most {largest:.3f} s (+- {error:.3f} s)")
    return findings or [replace(fine, node=ALL_NODES)]


def compare_probes(
    directory: str, results: Mapping[str, Mapping[str, ProbeResult]]
) -> list[Finding]:
    """Whether the nodes see one directory; `results` is node -> node that wrote -> what it saw."""
    unseen = {
        node: [writer for writer, result in seen.items() if result in UNSEEN]
        for node, seen in results.items()
    }
    findings = [
        replace(
            problem(
                f"{directory}: files that {_listed(writers)} wrote are not seen",
                expected="one directory that all nodes share",
                advice="mount the same file system at this path on all nodes, and choose a run "
                "directory on it",
            ),
            node=node,
        )
        for node, writers in unseen.items()
        if writers
    ]
    if findings:
        return findings
    if any(result == "lock not seen" for seen in results.values() for result in seen.values()):
        lockless = note(
            f"{directory}: a lock of one node is not seen by others",
            expected="locks that are valid on all nodes, which refuse a second run",
            advice="mount with locks (NFS: without nolock or local_lock; Lustre: flock), or make "
            "sure that no directory is used by two runs",
        )
        return [replace(lockless, node=ALL_NODES)]
    if len(results) < 2:
        return []
    return [replace(ok(f"{directory}: every node sees the files of the others"), node=ALL_NODES)]


def _listed(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:3])
    return shown if len(nodes) <= 3 else f"{shown} and {len(nodes) - 3} more"
