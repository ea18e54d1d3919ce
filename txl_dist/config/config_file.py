"""Run configs as files: read, changed by overrides, checked, and written.

`load_run_config` reads one YAML file, applies `a.b.c=value` overrides and validates the result as a
`RunConfig`. It reports all problems together, each with its line or override. `strict_yaml.py` has
the YAML rules, `problems.py` the text of the messages.
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

_ABSENT = object()
MAX_BYTES = 256 * 1024
"""A longer file is not a run config, and is not read into memory."""

_REQUIRED = {"directory": "", "data": {"path": ""}, "training": {"num_steps": 1}}
"""The settings without a default, with some legal value for each."""

Scalar = str | int | float | bool | None


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load and check the YAML file `path`, with `a.b.c=value` overrides.

    Raises ConfigError, which lists every problem with its line or override.
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
    """The resolved config as YAML, in schema order. `load_run_config` of it gives an equal config.

    Secrets become `***`, because run directories are copied and uploaded. Set them in the
    environment (`MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_PASSWORD`, `MLFLOW_TRACKING_TOKEN`).
    """
    return dump_yaml(redact(config.model_dump(mode="json")))


def flatten_config(config: RunConfig) -> dict[str, Scalar]:
    """All settings by dotted name, e.g. `optimizer.lr`. Lists are JSON text, secrets are `***`."""
    return _flatten(redact(config.model_dump(mode="json")))


def default_settings() -> dict[str, Scalar]:
    """All settings that have a default, by dotted name."""
    settings = flatten_config(RunConfig.model_validate(_REQUIRED))
    required = _flatten(_REQUIRED)
    return {key: value for key, value in settings.items() if key not in required}


def _flatten(values: Mapping[str, Any]) -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for name, value in values.items():
        # Lists stay whole: an index in a name would shift when an entry is added.
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": item for inner, item in _flatten(value).items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, list) else value
    return flat


class _Source:
    """A config that is being read: its raw value, the origin of each part, and the problems."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value: dict[str, Any] = {}
        self.problems: list[tuple[str, str]] = []
        """(origin, message) of each problem."""
        self._lines: dict[KeyPath, int] = {}
        self._overrides: dict[KeyPath, str] = {}

    def error(self) -> ConfigError:
        """One error that lists all problems."""
        texts = list(dict.fromkeys(f"{origin}: {message}" for origin, message in self.problems))
        if len(texts) == 1:
            return ConfigError(texts[0])
        return ConfigError("\n  ".join([f"{self.path}: {len(texts)} problems", *texts]))

    def read_file(self) -> None:
        """Load the mapping of the file. Raises ConfigError if it is not a mapping."""
        try:
            document = read_yaml(_read_text(self.path))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            origin = f"{self.path}:{mark.line + 1}" if mark else f"{self.path}"
            raise ConfigError(
                f"{origin}: not valid YAML: {_first_line(error)}. Quote text that contains ': ', "
                "'#' or brackets, and indent with spaces."
            ) from None
        self.problems += [(f"{self.path}:{line}", text) for line, text in document.problems]
        if not isinstance(document.value, dict):
            kind = "nothing" if document.value is None else kind_of(document.value)
            raise ConfigError(
                f"{self.path}: a config is a mapping of sections (data, model, training, ...), "
                f"found {kind}. See configs/quickstart.yaml for an example."
            )
        self.value, self._lines = document.value, document.lines

    def override(self, text: str) -> None:
        """Apply one `a.b.c=value`."""
        name, equals, value_text = text.partition("=")
        parts = tuple(name.strip().split("."))
        origin = f"override {redact(text) if not equals else name}"
        if not equals or not all(parts):
            self.problems.append((origin, "write it as section.key=value, e.g. optimizer.lr=1e-3"))
            return
        try:
            document = read_yaml(value_text)
        except yaml.YAMLError as error:
            quote = f"quote text that contains ': ', '#' or brackets: {name}='\"...\"'"
            self.problems.append((origin, f"not valid YAML: {_first_line(error)}; {quote}"))
            return
        self.problems += [(origin, message) for _, message in document.problems]
        # A section that is absent or null is created on the way down.
        section = self.value
        for depth, part in enumerate(parts[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                message = f"{dotted(parts[:depth])} is {kind_of(section)}, not a section"
                self.problems.append((origin, message))
                return
        section[parts[-1]] = document.value
        for origins in (self._lines, self._overrides):  # The new value replaces all below.
            for path in [path for path in origins if path[: len(parts)] == parts]:
                del origins[path]
        self._overrides[parts] = origin

    def validated(self) -> RunConfig | None:
        """The config, or None if it is invalid; then `problems` has all reasons.

        pydantic compares settings with each other only when each one is valid. So invalid settings
        are replaced by their defaults and validation runs again, until it finds no new problem.
        """
        value, invalid = copy.deepcopy(self.value), set[KeyPath]()
        reported = {origin for origin, _ in self.problems}
        while True:
            try:
                # As JSON, because only there strict mode accepts mappings for dataclasses and
                # lists for tuples.
                return RunConfig.model_validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                settings = self._add_schema_problems(error, invalid, reported)
            if settings <= invalid:
                return None
            invalid |= settings
            for path in settings:
                _replace_by_default(value, path)

    def _add_schema_problems(
        self, error: ValidationError, invalid: set[KeyPath], reported: set[str]
    ) -> set[KeyPath]:
        """Add pydantic's errors to the problems, and return the settings that they concern.

        Skipped are errors about `invalid` settings, which have their default now, and about
        origins in `reported`: a number that is too large is not a valid value either.
        """
        settings: set[KeyPath] = set()
        for details in error.errors(include_url=False):
            path = tuple(details["loc"])
            for text in explain(dict(details), path):
                concerned = self._settings_of(path, text)
                settings.update(concerned)
                named = [path, *_named_in(text, path, pattern=r"[a-z][\w.]*\w")]
                if any(_is_in(setting, invalid) for setting in named):
                    continue
                origin = ", ".join(dict.fromkeys(map(self._origin, concerned)))
                if origin not in reported:
                    self.problems.append((origin, text))
        return settings

    def _settings_of(self, path: KeyPath, text: str) -> list[KeyPath]:
        """The settings that an error at `path` concerns: if it is a section, those in the text."""
        if not isinstance(_value_at(self.value, path), dict):
            return [path]
        for pattern in (r"[a-z][\w.]*(?==)", r"[a-z][\w.]*\w"):  # Prefer `lr=1` to just `lr`.
            named = _named_in(text, path, pattern=pattern)
            present = [key for key in named if _value_at(self.value, key) is not _ABSENT]
            if present:
                return present
        return [path]

    def _origin(self, path: KeyPath) -> str:
        """The override or the line that set `path`, or the nearest section above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._overrides:
                return self._overrides[path[:length]]
            if path[:length] in self._lines:
                return f"{self.path}:{self._lines[path[:length]]}"
        return str(self.path)


def _named_in(text: str, section: KeyPath, *, pattern: str) -> list[KeyPath]:
    """Settings that the words of a message may mean: keys of the section, or full names."""
    # In a message about the section `optimizer`, `lr=1` means `optimizer.lr`.
    words = [tuple(word.split(".")) for word in re.findall(pattern, text)]
    paths = [path for word in words for path in ((*section, *word), word if len(word) > 1 else ())]
    return list(dict.fromkeys(path for path in paths if len(path) > 1))


def _is_in(path: KeyPath, sections: set[KeyPath]) -> bool:
    return any(path[:length] in sections for length in range(1, len(path) + 1))


def _value_at(value: Any, path: KeyPath) -> Any:
    """The value at `path`, or _ABSENT."""
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _replace_by_default(value: dict[str, Any], path: KeyPath) -> None:
    """Give the setting at `path` its default: remove it, or set the value in _REQUIRED."""
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


def _first_line(error: yaml.YAMLError) -> str:
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
            data = file.read(MAX_BYTES + 1)  # One more, to see that the file is too long.
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Check its permissions."
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_BYTES:,} bytes, so it is not a run config.")
    try:
        # Some Windows editors start a file with a byte order mark; "utf-8-sig" removes it.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8."
        ) from None


def _nearest_file(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except OSError:
        return f", and {path.parent} is not a readable directory."
    nearest = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    if not nearest:  # `quickstart` is too different from `quickstart.yaml` for difflib.
        nearest = [name for name in names if Path(name).stem == path.stem][:1]
    if nearest:
        return f"; did you mean {path.parent / nearest[0]}?"
    choices = [name for name in names if name.endswith((".yaml", ".yml"))]
    return f". {path.parent} contains: {', '.join(choices) or 'no YAML file'}"
