"""Run configs as files: read strictly, overridden from the command line, written back.

`load_run_config` reads one YAML file, puts `a.b.c=value` overrides over it and checks the whole
against the schema of `config.py`. Whatever is wrong is reported at once, each line saying what was
found, where and what is legal. The YAML rules are `strict_yaml.py`'s, the schema `config.py`'s.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from txl_dist.config import CorpusConfig, RunConfig
from txl_dist.errors import ConfigError
from txl_dist.redaction import redact
from txl_dist.strict_yaml import KeyPath, dotted, dump_yaml, read_yaml

__all__ = ["dump_run_config", "flatten_config", "load_run_config", "redact"]

MAX_BYTES = 256 * 1024
"""A config longer than this is something else."""

Scalar = str | int | float | bool | None


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked config of the YAML file `path`, with `a.b.c=value` overrides put over it.

    Raises ConfigError naming every problem found, with its line or override.
    """
    source = _Source(Path(path))
    source.read_file()
    for override in overrides:
        source.override(override)
    try:
        # By way of JSON: its strict mode takes mappings for dataclasses and lists for tuples.
        config = RunConfig.model_validate_json(json.dumps(source.value), strict=True)
    except ValidationError as error:
        source.add_schema_problems(error)
        raise source.error() from None
    if source.problems:
        raise source.error()
    return config


def dump_run_config(config: RunConfig) -> str:
    """The resolved config as YAML, in the schema's order; `load_run_config` reads it back equal.

    Secrets are left out (`***`): a run's directory is copied and uploaded. Give them by environment
    (`MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_PASSWORD`, `MLFLOW_TRACKING_TOKEN`).
    """
    return dump_yaml(redact(config.model_dump(mode="json")))


def flatten_config(config: RunConfig) -> dict[str, Scalar]:
    """Every setting by its dotted name, e.g. `optimizer.lr`; lists as JSON text, secrets `***`."""
    return _flatten(redact(config.model_dump(mode="json")))


def default_settings() -> dict[str, Scalar]:
    """Every setting that has a default, by dotted key."""
    required = {"directory": "", "data": {"path": ""}, "training": {"num_steps": 1}}
    settings = flatten_config(RunConfig.model_validate(required))
    return {
        key: value
        for key, value in settings.items()
        if key not in ("directory", "data.path", "training.num_steps")
    }


def _flatten(values: Mapping[str, Any]) -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": item for inner, item in _flatten(value).items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, list) else value
    return flat


class _Source:
    """A config on its way in: the raw value, where each part came from, and what is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value: dict[str, Any] = {}
        self.problems: list[tuple[str, str]] = []
        """(where, message) of everything wrong so far."""
        self._lines: dict[KeyPath, int] = {}
        self._overrides: dict[KeyPath, str] = {}

    def error(self) -> ConfigError:
        """One error that says every problem."""
        texts = list(dict.fromkeys(f"{where}: {message}" for where, message in self.problems))
        if len(texts) == 1:
            return ConfigError(texts[0])
        return ConfigError("\n  ".join([f"{self.path}: {len(texts)} problems", *texts]))

    def read_file(self) -> None:
        """Take the file's mapping. Raises ConfigError where there is nothing to go on with."""
        try:
            document = read_yaml(_read_text(self.path))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.path}:{mark.line + 1}" if mark else f"{self.path}"
            raise ConfigError(
                f"{where}: not valid YAML: {_syntax(error)}. Quote text that holds ': ', '#' or "
                "brackets, and indent with spaces."
            ) from None
        self.problems += [(f"{self.path}:{line}", text) for line, text in document.problems]
        if not isinstance(document.value, dict):
            found = "nothing" if document.value is None else _kind(document.value)
            raise ConfigError(
                f"{self.path}: a config is a mapping of sections (data, model, training, ...), "
                f"found {found}. See configs/quickstart.yaml for a complete one."
            )
        self.value, self._lines = document.value, document.lines

    def override(self, text: str) -> None:
        """Put one `a.b.c=value` over the file."""
        name, equals, value_text = text.partition("=")
        parts = tuple(name.strip().split("."))
        where = f"override {redact(text) if not equals else name}"
        if not equals or not all(parts):
            self.problems.append((where, "write it as section.key=value, e.g. optimizer.lr=1e-3"))
            return
        try:
            document = read_yaml(value_text)
        except yaml.YAMLError as error:
            quote = f"quote text that holds ': ', '#' or brackets: {name}='\"...\"'"
            self.problems.append((where, f"not valid YAML: {_syntax(error)}; {quote}"))
            return
        self.problems += [(where, message) for _, message in document.problems]
        section = self.value
        for depth, part in enumerate(parts[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                wrong = f"{dotted(parts[:depth])} is {_kind(section)}, not a section"
                self.problems.append((where, wrong))
                return
        section[parts[-1]] = document.value
        self._overrides[parts] = where

    def add_schema_problems(self, error: ValidationError) -> None:
        """Say each of pydantic's findings in this project's words, in the file's order."""
        known = {where for where, _ in self.problems}  # a refused alias is no value either
        for found in error.errors(include_url=False):
            path = tuple(found["loc"])
            where = self._where(path)
            if where not in known:
                self.problems.append((where, _explain(dict(found), path)))

    def _where(self, path: KeyPath) -> str:
        for overridden, where in self._overrides.items():
            if path and path == overridden[: len(path)] and path not in self._lines:
                return where
        for length in range(len(path), 0, -1):
            if path[:length] in self._overrides:
                return self._overrides[path[:length]]
            if path[:length] in self._lines:
                return f"{self.path}:{self._lines[path[:length]]}"
        return str(self.path)


def _syntax(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).splitlines()[0]


def _read_text(path: Path) -> str:
    if path.is_dir():
        hint = f"; did you mean {path / 'config.yaml'}?" if (path / "config.yaml").exists() else ""
        raise ConfigError(f"{path} is a directory, not a YAML file{hint or '.'}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is a device or a pipe, not a YAML file.")
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file{_nearest_file(path)}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Check its permissions."
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path} is longer than {MAX_BYTES:,} bytes; a run config is a page of YAML."
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8."
        ) from None


def _nearest_file(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except OSError:
        return f", and {path.parent} is no directory that can be read."
    nearest = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    if not nearest:  # `quickstart` for `quickstart.yaml`
        nearest = [name for name in names if Path(name).stem == path.stem][:1]
    if nearest:
        return f"; did you mean {path.parent / nearest[0]}?"
    choices = [name for name in names if name.endswith((".yaml", ".yml"))]
    return f". {path.parent} holds: {', '.join(choices) or 'no YAML file'}"


def _explain(found: Mapping[str, Any], path: KeyPath) -> str:
    kind, value, name = found["type"], found["input"], dotted(path)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {name}; {_nearest_key(path)}"
    if kind == "missing":
        return f"{name} is missing; give it a value (see configs/quickstart.yaml)"
    if kind == "value_error":
        text = str(found["msg"]).removeprefix("Value error, ")
        return f"{name}: {text}" if name else text
    if kind in ("model_type", "dataclass_type", "dict_type"):
        return f"{name} is a section; write its keys below it, found {_show(name, value)}"
    legal = str(found["msg"])[:1].lower() + str(found["msg"])[1:]
    return f"{name} is {_show(name, value)}; {legal.replace('input', 'it', 1)}{_hint(found)}"


def _hint(found: Mapping[str, Any]) -> str:
    kind, value = found["type"], found["input"]
    if kind == "bool_type":
        return "; write true or false"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return "; write the number without quotes, leading zeros or units"
    if kind == "string_type" and isinstance(value, (int, float)):
        return f"; quote it: '{value}'"
    if kind == "literal_error" and isinstance(value, str):
        legal = [
            word.strip("', ") for word in found["ctx"]["expected"].replace(" or ", ", ").split(",")
        ]
        nearest = difflib.get_close_matches(value, legal, n=1)
        return f"; did you mean {nearest[0]}?" if nearest else ""
    return ""


def _nearest_key(path: KeyPath) -> str:
    legal = _legal_keys()
    section, name = path[:-1], str(path[-1])
    if section[:2] == ("data", "mixture"):
        legal += [(*map(str, section), key) for key in CorpusConfig.model_fields]
    here = [key[-1] for key in legal if key[:-1] == section]
    nearest = difflib.get_close_matches(name, here, n=1)
    if nearest:
        return f"did you mean {dotted((*section, nearest[0]))}?"
    elsewhere = {".".join(key): key[-1] for key in legal}
    same = [full for full, last in elsewhere.items() if name in (last, full)]
    if same:
        return f"did you mean {same[0]}?" + (" Sections are nested." if same[0] == name else "")
    return f"legal here: {', '.join(here)}"


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


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")


def _show(name: str, value: Any) -> str:
    shown = redact({name.rpartition(".")[2]: value})
    text = json.dumps(next(iter(shown.values())), ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
