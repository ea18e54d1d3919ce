"""The parts of pages that are generated from the code, and are kept in the repository.

    python docs/site/references.py      # rewrite them

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. A test
compares the pages with the code; the site is built from the code.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from command_reference import command_reference
from pydantic import BaseModel
from settings_reference import recipe_table, settings_reference
from sources import ROOT

from data_pipeline.shards.manifest import InputSummary, ShardEntry, ShardManifest, SplitEntry
from txl_dist import errors
from txl_dist.checkpoint.manifest import CheckpointManifest, ParameterEntry, Slice
from txl_dist.config.removed import COMMANDS, SETTINGS
from txl_dist.config.starting_file import documentation_of

_MANIFESTS: dict[str, tuple[type[BaseModel], ...]] = {
    "a dataset": (ShardManifest, SplitEntry, ShardEntry, InputSummary),
    "a checkpoint": (CheckpointManifest, ParameterEntry, Slice),
}


def exit_codes() -> str:
    """The tree of errors, each with its exit code."""
    lines = inspect.cleandoc(errors.__doc__ or "").splitlines()
    return "\n".join(["```text", *(line[4:] for line in lines if line.startswith("    ")), "```"])


def decision_list() -> str:
    """One line for each decision record."""
    lines = []
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = path.read_text("utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines)


def removed_list() -> str:
    """What went, and what to use instead."""
    lines = ["| removed | use instead |", "|---|---|"]
    lines += [f"| `txl {words}` | {instead} |" for words, instead in COMMANDS.items()]
    lines += [f"| `{name}` | {removed.instead} |" for name, removed in SETTINGS.items()]
    return "\n".join(lines)


def manifest_fields() -> str:
    """Fields of both kinds of manifest and of what is inside, with what the code says of them."""
    lines = []
    for kind, models in _MANIFESTS.items():
        lines += [f"## `manifest.json` of {kind}", ""]
        for model in models:
            lines += [f"**{model.__name__}.** {inspect.cleandoc(model.__doc__ or '')}", ""]
            lines += _fields(model)
            lines.append("")
    return "\n".join(lines)


def _fields(model: type[BaseModel]) -> Iterator[str]:
    texts: dict[str, str] = {}
    for each in model.__mro__:
        if issubclass(each, BaseModel) and each is not BaseModel:
            texts |= documentation_of(each)
    for name, field in model.model_fields.items():
        kind = re.sub(r"[\w.]+\.(\w+)", r"\1", inspect.formatannotation(field.annotation))
        # Its limits may have brackets, also in patterns.
        kind = re.sub(r"Annotated\[(\w+), FieldInfo\(.*?\]\)\]", r"\1", kind)
        yield f"- `{name}`, `{kind}`" + (f": {texts[name]}" if name in texts else "")


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
