"""Messages for invalid configs, made from the errors of pydantic.

A message has the value and the valid values, or the nearest valid name. `config_file.py` adds its
origin: the line of the file, or the override.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from txl_dist.config.data_config import CorpusConfig
from txl_dist.config.redaction import redact
from txl_dist.config.run_config import RunConfig
from txl_dist.config.strict_yaml import KeyPath, dotted


def explain(error: Mapping[str, Any], path: KeyPath) -> list[str]:
    """Messages for one pydantic error at `path`.

    A validator that compares several settings puts each of its problems on a line of its message.
    """
    if error["type"] == "value_error":
        text = str(error["msg"]).removeprefix("Value error, ")
        name = dotted(path)
        return [f"{name}: {line}" if name else line for line in text.split("\n")]
    return [_explain_value(error, path)]


def _explain_value(error: Mapping[str, Any], path: KeyPath) -> str:
    kind, value, name = error["type"], error["input"], dotted(path)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {name}; {_nearest_key(path)}"
    if kind == "missing":
        return f"{name} is missing; give it a value (see configs/quickstart.yaml)"
    if kind in ("model_type", "dataclass_type", "dict_type"):
        return f"{name} is a section; write its keys below it, found {_show(name, value)}"
    # pydantic's text, such as "Input should be greater than 0", fitted into our sentence.
    rule = str(error["msg"])[:1].lower() + str(error["msg"])[1:]
    return f"{name} is {_show(name, value)}; {rule.replace('input', 'it', 1)}{_hint(error)}"


def _hint(error: Mapping[str, Any]) -> str:
    kind, value = error["type"], error["input"]
    if kind == "bool_type":
        return "; write true or false"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return "; write the number without quotes, leading zeros or units"
    if kind == "string_type" and isinstance(value, (int, float)):
        return f"; quote it: '{value}'"
    if kind == "literal_error" and isinstance(value, str):
        # pydantic lists the choices as text: "'a', 'b' or 'c'".
        choices = error["ctx"]["expected"].replace(" or ", ", ").split(",")
        nearest = difflib.get_close_matches(value, [word.strip("', ") for word in choices], n=1)
        return f"; did you mean {nearest[0]}?" if nearest else ""
    return ""


def _nearest_key(path: KeyPath) -> str:
    """A hint for an unknown key: a similar one in its section, or the same one in another."""
    legal = _legal_keys()
    section, name = path[:-1], str(path[-1])
    if section[:2] == ("data", "mixture"):
        legal += [(*map(str, section), key) for key in CorpusConfig.model_fields]
    siblings = [key[-1] for key in legal if key[:-1] == section]
    nearest = difflib.get_close_matches(name, siblings, n=1)
    if nearest:
        return f"did you mean {dotted((*section, nearest[0]))}?"
    last_part = {".".join(key): key[-1] for key in legal}
    same = [full for full, last in last_part.items() if name in (last, full)]
    if same:  # It is a key of another section, or was written as `a.b: value`.
        return f"did you mean {same[0]}?" + (" Sections are nested." if same[0] == name else "")
    return f"valid here: {', '.join(siblings)}"


def _legal_keys() -> list[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = []
    for name, info in RunConfig.model_fields.items():
        keys.append((name,))
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys += [(name, inner) for inner in section.model_fields]
        elif isinstance(section, type) and dataclasses.is_dataclass(section):
            keys += [(name, inner.name) for inner in dataclasses.fields(section)]
    return keys


def kind_of(value: Any) -> str:
    """The YAML kind of a value."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")


def _show(name: str, value: Any) -> str:
    """The value as JSON, shortened, and hidden if `name` is secret."""
    redacted = redact({name.rpartition(".")[2]: value})
    text = json.dumps(next(iter(redacted.values())), ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
