"""The page of all settings of a run, from the classes of txl_dist/config and the model's."""

import json
from collections.abc import Iterator
from typing import Any

from txl_dist.config.run_config import RunConfig
from txl_dist.config.starting_file import documentation_of
from txl_dist.config.training_config import OPTIMIZER_RECIPES
from txl_dist.model import choices
from txl_dist.model.config import ModelConfig

_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minItems": "items: at least",
}
_PATTERNS = {
    "training.checkpoint_url": "begins with `s3://` or `gs://`",
    "tracking.uri": "a URL such as `https://host:5000` or `sqlite:///file.db`; not `file:`",
    "tracking.experiment": "letters, digits, spaces and `_ . : @ / + -`, without a part `..`",
}
"""In words, what the regular expression of a setting allows."""
_UNKNOWN = "?"


def settings_reference() -> str:
    """Markdown: a heading per section; type, range, default and meaning of each setting."""
    schema = RunConfig.model_json_schema()
    definitions = schema["$defs"]
    lines = ["## The run", ""]
    for name, text in documentation_of(RunConfig).items():
        lines += _setting(name, schema["properties"][name], text, definitions)
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if name in documentation_of(RunConfig):
            continue
        assert isinstance(section, type)
        definition = definitions[section.__name__]
        lines += [f"## {name}", "", definition["description"], ""]
        for key, text in documentation_of(section).items():
            lines += _setting(f"{name}.{key}", definition["properties"][key], text, definitions)
    return "\n".join(lines)


def recipe_table() -> str:
    """What `model.recipe` sets: one row for each setting whose default differs."""
    lines = ["| setting | `paper` | `modern` |", "|---|---|---|"]
    for section, values in (
        ("model", choices.RECIPES["modern"]),
        ("optimizer", OPTIMIZER_RECIPES["modern"]),
    ):
        paper = RunConfig.model_fields[section].default
        for name, value in values.items():
            setting = f"{section}.{name}"
            before, after = json.dumps(getattr(paper, name)), json.dumps(value)
            lines.append(f"| [`{setting}`](#{setting}) | `{before}` | `{after}` |")
    return "\n".join(lines)


def _setting(name: str, schema: dict[str, Any], text: str, definitions: Any) -> Iterator[str]:
    limits = ", ".join(_limits(schema, name)) or (
        _model_limits(name.removeprefix("model.")) if name.startswith("model.") else ""
    )
    default = f"default `{json.dumps(schema['default'])}`" if "default" in schema else "required"
    facts = " · ".join(filter(None, (f"`{_type(schema)}`", limits, default)))
    yield from (f'### <a id="{name}"></a>`{name}`', "", facts, "", text, "")
    for part in _parts(schema):
        for key, entry in definitions[part]["properties"].items():
            kind = ", ".join([f"`{_type(entry)}`", *_limits(entry, key)])
            yield f"- `{key}`: {kind}"
        yield ""


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum") or [schema["const"]]))
    if "$ref" in schema:
        return "mapping"
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])} {_type(schema['prefixItems'][0])}s"
    if schema.get("type") == "array":
        kind = _type(schema["items"])
        return f"list of {kind}" if " " in kind else f"list of {kind}s"
    names = {"object": "mapping", "string": "text", "boolean": "true or false"}
    kind = str(schema["type"])
    return names.get(kind, kind)


def _limits(schema: dict[str, Any], name: str) -> Iterator[str]:
    for each in (schema, *schema.get("anyOf", ())):
        for key, words in _LIMITS.items():
            if key in each:
                yield f"{words} {'2^63' if each[key] == 2**63 else each[key]}"
        if "pattern" in each and each.get("type") == "string":
            yield _PATTERNS[name]


def _model_limits(name: str) -> str:
    """What the model's own check says of a value that no setting can have."""
    for value in (_UNKNOWN, -1, -1.0):
        try:
            ModelConfig(**{name: value})
        except (TypeError, ValueError) as error:
            _, of_it, rest = str(error).partition(f"{name}={value!r} must ")
            if of_it:
                return rest.removeprefix("be ").replace("not be negative", "at least 0")
    return ""


def _parts(schema: dict[str, Any]) -> Iterator[str]:
    """Names of the classes of which a setting is a list or a mapping."""
    for each in (schema, *schema.get("anyOf", ())):
        for part in (each.get("items", {}), *each.get("patternProperties", {}).values()):
            if "$ref" in part:
                yield part["$ref"].rpartition("/")[2]
