"""Run configs as files: read strictly, overridden from the command line, written back.

`load_run_config` reads one YAML file, puts `a.b.c=value` overrides over it and checks the whole
against the schema of `config.py`. All problems are reported together, each with the line or the
override it came from. The YAML rules are in `strict_yaml.py`, the wording in `config_problems.py`.
"""

import copy
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from txl_dist.config.problems import explain, kind_of
from txl_dist.config.redaction import redact
from txl_dist.config.run_config import RunConfig
from txl_dist.config.strict_yaml import KeyPath, dotted, dump_yaml, read_yaml
from txl_dist.errors import ConfigError

__all__ = ["dump_run_config", "flatten_config", "load_run_config", "redact"]

_NONE = object()
MAX_BYTES = 256 * 1024
"""A config longer than this is something else."""

_REQUIRED = {"directory": "", "data": {"path": ""}, "training": {"num_steps": 1}}
"""The settings without a default, and values for them that are legal."""

Scalar = str | int | float | bool | None


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked config of the YAML file `path`, with `a.b.c=value` overrides put over it.

    Raises ConfigError naming every problem found, with its line or override.
    """
    source = _Source(Path(path))
    source.read_file()
    for override in overrides:
        source.override(override)
    config = source.validated()
    if config is None or source.problems:
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
    settings = flatten_config(RunConfig.model_validate(_REQUIRED))
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
            found = "nothing" if document.value is None else kind_of(document.value)
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
                wrong = f"{dotted(parts[:depth])} is {kind_of(section)}, not a section"
                self.problems.append((where, wrong))
                return
        section[parts[-1]] = document.value
        self._forget_origins(parts)
        self._overrides[parts] = where

    def _forget_origins(self, path: KeyPath) -> None:
        """What stood below `path` before is replaced."""
        for origins in (self._lines, self._overrides):
            for below in [key for key in origins if key[: len(path)] == path]:
                del origins[below]

    def validated(self) -> RunConfig | None:
        """The config, or None; what is wrong with it is added to the problems.

        Checks that compare settings run only if each of these is legal by itself. So what was
        refused is replaced by its default, and the rest is checked again, until nothing new comes.
        """
        value, refused = copy.deepcopy(self.value), set[KeyPath]()
        known = {where for where, _ in self.problems}
        while True:
            try:
                # By way of JSON: its strict mode takes mappings for dataclasses, lists for tuples.
                return RunConfig.model_validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                found = self._add_schema_problems(error, refused, known)
            if found <= refused:
                return None
            refused |= found
            for path in found:
                _replace_by_default(value, path)

    def _add_schema_problems(
        self, error: ValidationError, refused: set[KeyPath], known: set[str]
    ) -> set[KeyPath]:
        """Add pydantic's findings, except those about a refused setting, which has its default now.

        Returns the settings they are about. `known` are places that have a problem already: a
        refused alias is no value either.
        """
        settings: set[KeyPath] = set()
        for found in error.errors(include_url=False):
            path = tuple(found["loc"])
            for text in explain(dict(found), path):
                about = self._settings_of(path, text)
                settings.update(about)
                named = [path, *_named_in(text, path, pattern=r"[a-z][\w.]*\w")]
                if any(_is_in(setting, refused) for setting in named):
                    continue
                where = ", ".join(dict.fromkeys(map(self._where, about)))
                if where not in known:
                    self.problems.append((where, text))
        return settings

    def _settings_of(self, path: KeyPath, text: str) -> list[KeyPath]:
        """What a finding at `path` is about: that setting, or those of a section that it names."""
        if not isinstance(_value_at(self.value, path), dict):
            return [path]
        for pattern in (r"[a-z][\w.]*(?==)", r"[a-z][\w.]*\w"):  # `lr=1` rather than just `lr`
            named = _named_in(text, path, pattern=pattern)
            given = [setting for setting in named if _value_at(self.value, setting) is not _NONE]
            if given:
                return given
        return [path]

    def _where(self, path: KeyPath) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self._overrides:
                return self._overrides[path[:length]]
            if path[:length] in self._lines:
                return f"{self.path}:{self._lines[path[:length]]}"
        return str(self.path)


def _named_in(text: str, section: KeyPath, *, pattern: str) -> list[KeyPath]:
    """The settings that the words of a message may mean: of the section, or by their full names."""
    words = [tuple(word.split(".")) for word in re.findall(pattern, text)]
    paths = [path for word in words for path in ((*section, *word), word if len(word) > 1 else ())]
    return list(dict.fromkeys(path for path in paths if len(path) > 1))


def _is_in(path: KeyPath, sections: set[KeyPath]) -> bool:
    return any(path[:length] in sections for length in range(1, len(path) + 1))


def _value_at(value: Any, path: KeyPath) -> Any:
    """The value at `path`, or _NONE."""
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return _NONE
        value = value[part]
    return value


def _replace_by_default(value: dict[str, Any], path: KeyPath) -> None:
    default: Any = _REQUIRED
    for depth, part in enumerate(map(str, path), start=1):
        default = default.get(part) if isinstance(default, dict) else None
        if depth < len(path) and isinstance(value.get(part), dict):
            value = value[part]
        elif default is None:
            value.pop(part, None)
            return
        else:
            value[part] = copy.deepcopy(default)
            return


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
