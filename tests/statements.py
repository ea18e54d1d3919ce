"""The packages do not grow unnoticed: tests/statements.toml says how many statements each part has.

    python -m tests.statements            # compare; `make check` runs it
    python -m tests.statements --write    # after a part has shrunk, or code has moved

A change that needs more statements gives its reason in the file, in a new entry `[[raised]]`. The
numbers count statements and not lines, so that they do not depend on the formatting.
"""

import argparse
import ast
import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "statements.toml"
HEADER = """\
# Statements of each part of the packages, compared by tests/statements.py in `make check`.
# `python -m tests.statements --write` rewrites the numbers, but does not raise their sum.
# A change that needs more statements adds an entry at the end:
#
#     [[raised]]
#     part = "txl_dist/training"
#     by = 40
#     reason = "what users have from it"

[statements]
"""
RAISED = ("part", "by", "reason")
TOLERATED = 20
"""Statements below its number that a part may have without a hint to lower the number."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the numbers of today")
    written, counted = tomllib.loads(FILE.read_text("utf-8")), count(ROOT)
    if parser.parse_args().write:
        FILE.write_text(rewritten(written, counted), "utf-8")
    else:
        too_many, fewer = compare(written, counted)
        print(*fewer, *too_many, sep="\n", end="\n" if fewer or too_many else "")
        sys.exit(bool(too_many))


def count(root: Path) -> Counter[str]:
    """Count the statements of each part: a package in a package, or the files beside these."""
    counted: Counter[str] = Counter()
    for package in ("data_pipeline", "txl_dist", "cluster"):
        for path in (root / package).rglob("*.py"):
            inside = path.relative_to(root).parts[:-1]
            part = package if package == "cluster" else "/".join(inside[:2])
            tree = ast.parse(path.read_text("utf-8"))
            counted[part] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    return counted


def limits(written: dict[str, Any]) -> Counter[str]:
    """The number of each part, with what was added to it for a reason."""
    allowed = Counter(written["statements"])
    for entry in written.get("raised", ()):
        if len(entry["reason"].split()) < 3:
            raise SystemExit(f"{FILE}: {entry} needs a reason of some words")
        allowed[entry["part"]] += entry["by"]
    return allowed


def compare(written: dict[str, Any], counted: Counter[str]) -> tuple[list[str], list[str]]:
    """One line for each part with too many statements, and one for each with fewer than written."""
    allowed = limits(written)
    too_many = [
        f"{part} has {counted[part]:,} statements, {allowed[part]:,} are allowed. Make it smaller,"
        f" or add [[raised]] with part, by and reason to {FILE.relative_to(ROOT)}. If code has only"
        " moved: python -m tests.statements --write"
        for part in sorted(counted)
        if counted[part] > allowed[part]
    ]
    fewer = [
        f"{part} has {counted[part]:,} statements, {allowed[part]:,} are allowed:"
        " python -m tests.statements --write lowers the number"
        for part in sorted(allowed)
        if counted[part] < allowed[part] - TOLERATED
    ]
    return too_many, fewer


def rewritten(written: dict[str, Any], counted: Counter[str]) -> str:
    """The file with the numbers of today. Ends the program if all parts together have grown."""
    allowed = limits(written)
    if allowed and counted.total() > allowed.total():
        raise SystemExit(
            f"The packages have {counted.total():,} statements, {allowed.total():,} are allowed."
            f" Add [[raised]] with part, by and reason to {FILE.relative_to(ROOT)} first."
        )
    entries = [entry for entry in written.get("raised", ()) if entry["part"] in counted]
    raised: Counter[str] = Counter()
    for entry in entries:
        raised[entry["part"]] += entry["by"]
    numbers = [f'"{part}" = {counted[part] - raised[part]}' for part in sorted(counted)]
    reasons = [
        "\n".join(["", "[[raised]]", *(f"{key} = {json.dumps(entry[key])}" for key in RAISED)])
        for entry in entries
    ]
    return HEADER + "\n".join([*numbers, *reasons]) + "\n"


if __name__ == "__main__":
    main()
