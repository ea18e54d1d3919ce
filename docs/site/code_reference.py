"""Small parts of the reference: the errors with exit codes, fields of manifests, the decisions."""

import inspect
import re

from pydantic import BaseModel
from sources import ROOT

from data_pipeline.shards.manifest import InputSummary, ShardEntry, ShardManifest, SplitEntry
from txl_dist import errors
from txl_dist.checkpoint.manifest import CheckpointManifest, ParameterEntry, Slice
from txl_dist.config.config_file import documentation_of

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


def _fields(model: type[BaseModel]) -> list[str]:
    texts: dict[str, str] = {}
    for each in model.__mro__:
        if issubclass(each, BaseModel) and each.__module__.startswith(
            ("data_pipeline", "txl_dist")
        ):
            texts |= documentation_of(each)
    lines = []
    for name, field in model.model_fields.items():
        kind = re.sub(r"[\w.]+\.(\w+)", r"\1", inspect.formatannotation(field.annotation))
        # Its limits may have brackets, also in patterns.
        kind = re.sub(r"Annotated\[(\w+), FieldInfo\(.*?\]\)\]", r"\1", kind)
        text = f": {texts[name]}" if name in texts else ""
        lines.append(f"- `{name}`, `{kind}`{text}")
    return lines
