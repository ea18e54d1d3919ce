"""The fault matrix: which tests prove what happens in each of 50 faults. Source of docs/faults.md.

    python -m tests.faults.matrix            # print the table
    python -m tests.faults.matrix --write    # write docs/faults.md, after a test was added
    make faults                              # --run: run the tests, print the table with results

A test belongs to a row by `@pytest.mark.fault_row(N)`, wherever it is. The tests are found in the
source, without importing them. With `--run` the status of a row is that of its tests.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "faults.md"
NUM_ROWS = 50

FAULTS = (
    "SIGKILL of a rank in a step",
    "SIGKILL of the launcher",
    "SIGKILL of a Ray node",
    "the head of the Ray cluster dies",
    "SIGTERM: preemption",
    "second SIGTERM or SIGINT during a save",
    "SIGSTOP of a rank: it hangs",
    "kill during the write of a checkpoint, at every file",
    "kill between the rename of a checkpoint and LATEST",
    "disk full while a checkpoint is written",
    "disk full while shards are written",
    "output directory read-only or missing",
    "shard truncated",
    "bit flipped in a shard",
    "shard missing, extra, renamed or swapped",
    "manifest edited, corrupt, or of another corpus",
    "shard overwritten while training reads it",
    "slow storage, stalled read",
    "object store answers 503 or not at all",
    "zstd bomb, oversized window",
    "tar with path traversal, links, absolute names",
    "pickle in a shard, `pipe:` URL in a config",
    "pickle with code in a checkpoint",
    "checkpoint corrupt, incomplete, empty LATEST",
    "other tokenizer or vocabulary at a resume",
    "other model or settings at a resume",
    "other number of ranks at a resume",
    "NaN or infinity in the loss or gradient of one rank",
    "loss spike",
    "fp16: overflow storm",
    "MLflow down at the start",
    "MLflow dies, is slow, answers 500 or 401",
    "MLflow run deleted or finished by someone else",
    "clock jumps",
    "two runs in one directory",
    "resume while the old run lives",
    "port in use, rendezvous that times out",
    "a rank with other code, config or data",
    "uneven numbers of batches on the ranks",
    "a data worker is killed",
    "processes left after Ctrl-C",
    "log on a full disk",
    "Ray dashboard without authentication",
    "secrets in settings, URLs and logs",
    "path traversal in names",
    "YAML: tags, alias bomb, duplicate and unknown keys",
    "NUL bytes, invalid Unicode, a line of 1 GB in a corpus",
    "`txl prepare` interrupted",
    "evaluation job killed",
    "disk returns EIO",
)
assert len(FAULTS) == NUM_ROWS

Status = Literal["tested", "not applicable", "no test", "FAILED", "not shown"]
NOT_APPLICABLE = {30: "fp16 is refused, with `precision: bf16` as advice: no loss scale"}
REMARKS = {
    29: "no option resets the memory: after a rollback no token attends across the gap",
    40: "training reads shards in a thread of each rank, so there is no worker to lose; the row is "
    "about the workers of `txl prepare`",
}  # fmt: skip
"""Row -> what its tests do not say."""


Test = tuple[Path, str]
"""Path below the directory of the tests, and name of the function."""


def find_tests() -> dict[int, list[Test]]:
    """By row, all tests with its marker, in the order of their files."""
    found: dict[int, list[Test]] = {row: [] for row in range(1, NUM_ROWS + 1)}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "fault_row" not in text:
            continue
        for function in ast.parse(text).body:
            for decorator in getattr(function, "decorator_list", ()):
                if ast.unparse(getattr(decorator, "func", decorator)).endswith(".fault_row"):
                    for row in decorator.args:
                        found[row.value].append((path.relative_to(TESTS), function.name))
    return found


def status_of(row: int, num_tests: int, outcomes: Counter[str] | None = None) -> Status:
    """The status of a row with `num_tests` tests, by their outcomes if they were run."""
    if row in NOT_APPLICABLE:
        return "not applicable"
    if not num_tests:
        return "no test"
    if outcomes is None:
        return "tested"
    if outcomes["failed"]:
        return "FAILED"
    return "tested" if outcomes["passed"] else "not shown"


def remark_on(row: int) -> str:
    return NOT_APPLICABLE.get(row) or REMARKS.get(row, "")


def page() -> str:
    tests = find_tests()
    counts = Counter(status_of(row, len(tests[row])) for row in tests)
    lines = [
        "# Faults",
        "",
        "<!-- Written by `python -m tests.faults.matrix --write`. -->",
        "",
        "Each fault is injected by tests, with real kills, full file systems and damaged files; "
        "`make faults`",
        "runs them all and prints this table with the results. `make chaos N=1000` kills random "
        "processes of",
        "training runs at random moments. To make a rank fail at a named point of your own run, "
        "set `TXL_FAULT`",
        "([`fault_injection.py`](../txl_dist/runtime/fault_injection.py)). Other faults are [not "
        "answered](faults_not_answered.md).",
        "",
        ", ".join(f"{counts[status]} {status}" for status in counts) + f"; {NUM_ROWS} in total.",
        "",
        "| # | fault | status | tests |",
        "|--|--|--|--|",
    ]
    for row, of_row in tests.items():
        status, remark = status_of(row, len(of_row)), remark_on(row)
        links = [
            f"[{name.removeprefix('test_').replace('_', ' ')}](../tests/{path.as_posix()})"
            for path, name in of_row
        ]
        cell = f"{status}: {remark}" if remark else status
        lines.append(f"| {row} | {FAULTS[row - 1]} | {cell} | {'; '.join(links)} |")
    return "\n".join(lines) + "\n"


class ResultCollector:
    """A pytest plugin: the outcomes of every test function."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            function = report.nodeid.partition("[")[0]
            self.outcomes.setdefault(function, Counter())[report.outcome] += 1


def print_table(outcomes: Mapping[str, Counter[str]] | None = None) -> None:
    """One line per row; with `outcomes`, how many of its tests passed, failed and were skipped."""
    for row, of_row in find_tests().items():
        result, total = f"{len(of_row)} tests", None
        if outcomes is not None:
            nodes = (f"tests/{path.as_posix()}::{name}" for path, name in of_row)
            total = sum((outcomes.get(node, Counter()) for node in nodes), Counter())
            result = ", ".join(f"{n} {outcome}" for outcome, n in total.items()) or "not run"
        status = status_of(row, len(of_row), total)
        print(f"{row:>2}  {FAULTS[row - 1]:<58} {status:<14} {result}")
        if remark := remark_on(row):
            print(f"      {remark}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/faults.md")
    parser.add_argument("--run", action="store_true", help="run the tests; other words to pytest")
    options, words = parser.parse_known_args()
    if options.write:
        PAGE.write_text(page(), encoding="utf-8")
    if not options.run:
        print_table()
        return 0
    collector = ResultCollector()
    code = pytest.main(["-m", "fault or fault_row", *words], plugins=[collector])
    print_table(collector.outcomes)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
