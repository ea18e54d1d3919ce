"""Blocks of commands and Python in documents: what a reader would copy, and what is said of them.

A line above a block may say why no test runs it as it is written, or which test does:

    <!-- not run: needs two hosts -->
    <!-- run by tests/test_readme.py -->
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run:|run by) (?P<text>[^\n]*) -->\n)?"
    r"^ *```(?P<language>bash|sh|python)\n(?P<content>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_FENCED = re.compile(r"^ *(```+).*?^ *\1$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^ {4,}(?:txl|python|make|ray|torchrun|pip|mlflow) .*", re.MULTILINE)
DATED = ("docs/decisions/", "docs/experiments.md")
"""Commands of their day."""
HAS_OWN_MARKS = "docs/how_to/run_on_a_cluster.md"
"""tests/cluster/deploy/test_how_to.py runs its blocks word for word."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    content: str
    not_run: str | None
    """Why no test runs it."""
    run_by: str | None
    """Path of the test that does."""

    @property
    def is_here(self) -> bool:
        """Whether test_documented_blocks.py has to run it."""
        return not self.not_run and not self.run_by


def pages() -> Iterator[str]:
    """Paths of the documents whose blocks are checked."""
    yield from ("README.md", "CONTRIBUTING.md", "SECURITY.md", "cluster/deploy/README.md")
    for path in (*sorted((ROOT / "configs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        page = str(path.relative_to(ROOT))
        if not page.startswith(DATED) and page != HAS_OWN_MARKS:
            yield page


def blocks(page: str) -> list[Block]:
    """All blocks of a document, in their order."""
    text = (ROOT / page).read_text("utf-8")
    return [
        Block(
            page=page,
            language="python" if found["language"] == "python" else "bash",
            content=textwrap.dedent(found["content"]),
            not_run=found["text"] if found["mark"] == "not run:" else None,
            run_by=found["text"] if found["mark"] == "run by" else None,
        )
        for found in _BLOCK.finditer(text)
    ]


def commands_outside_blocks(page: str) -> list[str]:
    """Indented commands, which no test would find."""
    text = _FENCED.sub("", (ROOT / page).read_text("utf-8"))
    return [command.strip() for command in _COMMAND.findall(text)]
