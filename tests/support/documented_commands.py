"""The txl commands in documents, in headers of configs, in files of deployments and in `--help`."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import yaml

from txl_dist.cli.app import app
from txl_dist.cli.options import paths_of_another_machine

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"^ *```(?:sh|bash)?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)
_IN_COMMENT = re.compile(r"^# *(?:.*: )?(txl [a-z].*(?:\n# {4,}\S.*)*)", re.MULTILINE)
_EXAMPLE = re.compile(r"Example: (txl .*(?:\n(?!\s*(?:Example|$)).*)*)")


@dataclass(frozen=True)
class DocumentedCommand:
    """One command and where it is written."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def documented_commands() -> Iterator[DocumentedCommand]:
    """All complete commands: those with "..." or in a sentence are examples of a part."""
    for place, text in _texts():
        for line in text.replace("\\\n", " ").splitlines():
            command = line.partition(" > ")[0]  # into a file
            words = tuple(shlex.split(command, comments=True)) if line.startswith("txl ") else ()
            if words and "..." not in words:
                yield DocumentedCommand(place, words)
                if "--" in words:  # txl job submit -- COMMAND
                    yield DocumentedCommand(place, ("txl", *words[words.index("--") + 1 :]))


def mentioned_commands() -> Iterator[DocumentedCommand]:
    """The commands in sentences, which may be incomplete: `txl job`, `txl eval --details`.

    Not those of experiments.md and decisions/, commands of that day, and of removed.md.
    """
    documents = _documents()
    for package in ("data_pipeline", "txl_dist", "cluster"):
        documents += (ROOT / package).rglob("*.py")
    for path in documents:
        for text in re.findall(r"`(txl [a-z][^`\n]*)`", path.read_text()):
            yield DocumentedCommand(_name(path), tuple(text.split()))


def _documents() -> list[Path]:
    documents = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("c*/**/*.md")]
    others = {ROOT / "docs/experiments.md", ROOT / "docs/removed.md"}
    others.update(ROOT.glob("docs/decisions/*.md"))
    return [path for path in documents if path not in others]


def _texts() -> Iterator[tuple[str, str]]:
    """Texts of commands, one per line, each with its place."""
    for path in _documents():
        text = path.read_text()
        for block in (*_FENCED.findall(text), *_INDENTED.findall(_FENCED.sub("", text))):
            yield _name(path), re.sub("^ +", "", block, flags=re.MULTILINE)
    for path in (*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("cluster/deploy/**/*.*")):
        if path.suffix not in (".yaml", ".sh"):
            continue
        text = path.read_text()
        for command in _IN_COMMENT.findall(text):
            yield _name(path), re.sub(r"\n# +", " ", command)
        if path.suffix == ".yaml":
            for entrypoint in _entrypoints([*yaml.safe_load_all(text)]):
                yield _name(path), entrypoint
    for command in leaf_commands(typer.main.get_command(app)).values():
        for example in _EXAMPLE.findall(command.help or ""):
            yield f"help of {command.name}", " ".join(example.split())


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


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
    with paths_of_another_machine():
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
