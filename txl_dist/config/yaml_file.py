"""YAML 1.2 of config files, by ruamel.yaml: values with the line of each, and its dump.

Repeated keys and numbers that are not finite are collected as problems, so one reading shows all of
them. Keys that are not text, tags, aliases (nested ones expand exponentially) and nesting deeper
than MAX_DEPTH end the reading, as any syntax error does.
"""

import difflib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from txl_dist.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Keys and list indices that lead to a value from the top."""

MAX_DEPTH = 32
MAX_BYTES = 256 * 1024
"""A longer file is not a run config, and is not read."""
_TEXT, _TIMESTAMP = "tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp"


class YamlTextError(Exception):
    """Text that cannot be read. `place` is `:LINE:COLUMN`, from 1, or empty."""

    def __init__(self, message: str, mark: Any = None) -> None:
        super().__init__(message)
        self.place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""


@dataclass
class YamlDocument:
    """The value of a text, the line (from 1) of every value and key, and the problems."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line, message) of each."""


class _Constructor(SafeConstructor):
    """Dates stay text."""


_Constructor.add_constructor(_TIMESTAMP, SafeConstructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    def represent_str(self, text: str) -> Any:
        # Without double quotes these line ends are written unescaped, and read as spaces.
        style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
        return self.represent_scalar(_TEXT, text, style)


_Representer.add_representer(str, _Representer.represent_str)


def _yaml() -> YAML:
    yaml: Any = YAML(typ="safe", pure=True)  # its attributes have no declared types
    yaml.Constructor, yaml.Representer = _Constructor, _Representer
    yaml.allow_duplicate_keys = True  # `_index` reports them, without their values.
    yaml.default_flow_style, yaml.width = False, 100
    yaml.sort_base_mapping_type_on_output = False
    return yaml


def read_yaml(text: str) -> YamlDocument:
    """Read one YAML document. Raises YamlTextError if the reading cannot continue."""
    document, yaml = YamlDocument(), _yaml()
    try:
        _refuse_unsupported(text)
        node = yaml.compose(text)
        if node is not None:
            _index(node, (), document)
            document.value = yaml.constructor.construct_document(node)
    except MarkedYAMLError as error:
        raise YamlTextError(str(error.problem), error.problem_mark) from None
    except YAMLError as error:
        raise YamlTextError(str(error).splitlines()[0]) from None
    return document


def dump_yaml(value: Mapping[str, Any]) -> str:
    """YAML text in the order of the mapping. `read_yaml` of it gives an equal value."""
    text = io.StringIO()
    _yaml().dump(dict(value), text)
    return text.getvalue()


def _refuse_unsupported(text: str) -> None:
    depth = 0
    for event in _yaml().parse(text):
        is_alias = isinstance(event, AliasEvent)
        if is_alias or getattr(event, "tag", None):
            kind = "alias" if is_alias else "tag"
            message = f"a YAML {kind} is not supported; write the value out"
            raise YamlTextError(message, event.start_mark)
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise YamlTextError(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)


def _index(node: Node, path: KeyPath, document: YamlDocument) -> None:
    """Record the lines and the problems of a node and everything in it."""
    line = node.start_mark.line + 1
    # For a mapping's value the line of its key is already there, and is the better one to show.
    document.lines.setdefault(path, line)
    if isinstance(node, SequenceNode):
        for number, item in enumerate(node.value):
            _index(item, (*path, number), document)
    elif isinstance(node, MappingNode):
        for key_node, value_node in node.value:
            _index_entry(key_node, value_node, path, document)
    elif str(node.tag).endswith((":int", ":float")):
        try:
            is_finite = math.isfinite(float(node.value))
        except ValueError:  # .inf, or a number that is not decimal
            is_finite = False
        if not is_finite:
            text = f"{node.value[:40]} is not a finite decimal number; quote it if it is text"
            document.problems.append((line, text))
            node.value = "0"


def _index_entry(key_node: Node, value_node: Node, path: KeyPath, document: YamlDocument) -> None:
    line, key = key_node.start_mark.line + 1, key_node.value
    if key_node.tag != _TEXT:
        raise YamlTextError(f"a key must be text, found {key!s:.40}; quote it", key_node.start_mark)
    if first := document.lines.get((*path, key)):
        name = dotted((*path, key))
        document.problems.append((line, f"{name} is given twice, first on line {first}; keep one"))
        return
    document.lines[(*path, key)] = line
    _index(value_node, (*path, key), document)


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0)` as `a.b[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_text(path: Path) -> str:
    """The text of a config file. Raises ConfigError if it is none."""
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
