"""The parts of pages that are generated from the code, and are kept in the repository.

    python docs/site/references.py      # rewrite them

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. A test
compares the pages with the code; the site is built from the code.
"""

import re
from collections.abc import Callable
from pathlib import Path

from code_reference import decision_list, exit_codes, manifest_fields
from command_reference import command_reference
from settings_reference import recipe_table, settings_reference
from sources import ROOT

from txl_dist.config.removed import removed_list

REFERENCES: dict[str, Callable[[], str]] = {
    "commands": command_reference,
    "decisions": decision_list,
    "exit codes": exit_codes,
    "manifests": manifest_fields,
    "recipes": recipe_table,
    "removed": removed_list,
    "settings": settings_reference,
}
_PART = re.compile(
    r"^<!-- generated: ([a-z ]+) -->\n.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL
)


def filled(page: str) -> str:
    """The page with its generated parts as the code is now."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return (
            f"<!-- generated: {name} -->\n\n{REFERENCES[name]().strip()}\n\n<!-- end of {name} -->"
        )

    return _PART.sub(part, page)


def pages() -> list[Path]:
    """The pages of docs/ that have generated parts."""
    return [path for path in (ROOT / "docs").rglob("*.md") if _PART.search(path.read_text("utf-8"))]


if __name__ == "__main__":
    for path in pages():
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
