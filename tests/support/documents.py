"""What a reader would copy from documents: blocks of commands and Python, and single txl commands.

A line above a block may say why no test runs it as it is written, or which test does:

    <!-- not run: needs two hosts -->
    <!-- run by tests/test_examples.py -->
"""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer.main
import yaml

from txl_dist.cli.app import app

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run:|run by) (?P<text>[^\n]*) -->\n)?"
    r"^ *```(?P<language>bash|sh|python)\n(?P<content>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_FENCED = re.compile(r"^ *(```+).*?^ *\1$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(
    r"^<!-- generated: ([a-z ]+) -->\n.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL
)
"""Examples of `--help`, which are commands of their own here."""
_INDENTED = re.compile(r"^ {4,}(?:txl|python|make|ray|torchrun|pip|mlflow) .*", re.MULTILINE)
_IN_COMMENT = re.compile(r"^# *(?:.*: )?(txl [a-z].*(?:\n# {4,}\S.*)*)", re.MULTILINE)
_EXAMPLE = re.compile(r"Example: (txl .*(?:\n(?!\s*(?:Example|$)).*)*)")
_DATED = ("docs/decisions/", "docs/experiments")
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
        return not self.not_run and not self.run_by


@dataclass(frozen=True)
class DocumentedCommand:
    """One command and where it is written."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def pages() -> list[str]:
    """Paths of the documents with commands of today."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    for folder in ("cluster", "configs", "docs"):
        paths += sorted((ROOT / folder).rglob("*.md"))
    return [page for path in paths if not (page := _name(path)).startswith(_DATED)]


def blocks(page: str) -> list[Block]:
    """All blocks of a document that are not generated, in their order."""
    return [
        Block(
            page=page,
            language="python" if found["language"] == "python" else "bash",
            content=textwrap.dedent(found["content"]),
            not_run=found["text"] if found["mark"] == "not run:" else None,
            run_by=found["text"] if found["mark"] == "run by" else None,
        )
        for found in _BLOCK.finditer(_GENERATED.sub("", (ROOT / page).read_text("utf-8")))
    ]


def commands_outside_blocks(page: str) -> list[str]:
    """Indented commands, which no test would find."""
    text = _FENCED.sub("", (ROOT / page).read_text("utf-8"))
    return [command.strip() for command in _INDENTED.findall(text)]


def documented_commands() -> Iterator[DocumentedCommand]:
    """All complete txl commands in documents, headers of configs, deployment files and `--help`.

    Those with "..." or in a sentence are examples of a part.
    """
    for place, text in _texts():
        for line in text.replace("\\\n", " ").splitlines():
            command = line.partition(" > ")[0]  # into a file
            words = tuple(shlex.split(command, comments=True)) if line.startswith("txl ") else ()
            if words and "..." not in words:
                yield DocumentedCommand(place, words)
                if "--" in words:  # txl job submit -- COMMAND
                    yield DocumentedCommand(place, ("txl", *words[words.index("--") + 1 :]))


def mentioned_commands() -> Iterator[DocumentedCommand]:
    """The commands in sentences, which may be incomplete: `txl job`, `txl eval --details`."""
    documents = [ROOT / page for page in pages() if page != "docs/removed.md"]
    for package in ("data_pipeline", "txl_dist", "cluster"):
        documents += (ROOT / package).rglob("*.py")
    for path in documents:
        for text in re.findall(r"`(txl [a-z][^`\n]*)`", path.read_text("utf-8")):
            yield DocumentedCommand(_name(path), tuple(text.split()))


def _texts() -> Iterator[tuple[str, str]]:
    """Texts of commands, one per line, each with its place."""
    for page in pages():
        for block in blocks(page):
            yield page, block.content
    for path in (*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("cluster/deploy/**/*.*")):
        if path.suffix not in (".yaml", ".sh"):
            continue
        text = path.read_text("utf-8")
        for command in _IN_COMMENT.findall(text):
            yield _name(path), re.sub(r"\n# +", " ", command)
        if path.suffix == ".yaml":
            for entrypoint in _entrypoints([*yaml.safe_load_all(text)]):
                yield _name(path), entrypoint
    for command in leaf_commands(typer.main.get_command(app)).values():
        for example in _EXAMPLE.findall(command.help or ""):
            yield f"help of {command.name}", " ".join(example.split())


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _entrypoints(content: Any) -> Iterator[str]:
    """The values of `entrypoint` anywhere in a YAML file: the commands of Ray jobs."""
    if isinstance(content, list):
        for item in content:
            yield from _entrypoints(item)
    elif isinstance(content, dict):
        for key, value in content.items():
            if key == "entrypoint":
                yield value
            yield from _entrypoints(value)


def leaf_commands(group: Any, above: str = "") -> dict[str, Any]:
    """Every command of a group of typer by its words, such as "data verify"."""
    commands: dict[str, Any] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            commands |= leaf_commands(command, f"{above}{name} ")
        else:
            commands[above + name] = command
    return commands


def parse(words: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """The command that these words run, and its parameters. Raises UsageError, like txl."""
    root, parsed = _recording_commands()
    parsed.clear()
    with patch.object(Path, "exists", return_value=True):  # their checkpoints are no files here
        root(list(words[1:]), prog_name="txl", standalone_mode=False)
    (only,) = parsed
    return only


@cache
def _recording_commands() -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """txl, whose commands only append their name and parameters to a list."""
    root = typer.main.get_command(app)
    parsed: list[tuple[str, dict[str, Any]]] = []
    for name, command in leaf_commands(root).items():
        command.callback = lambda _name=name, **parameters: parsed.append((_name, parameters))
    return root, parsed
