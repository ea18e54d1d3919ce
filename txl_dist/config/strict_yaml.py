"""Strict YAML: mappings, lists, text, numbers, true/false and null, with the line of each value.

PyYAML reads YAML 1.1, where `no` is false, `1e-3` is text, `010` is eight and `1:30` is ninety.
Here scalars follow YAML 1.2. Keys that are not text, repeated keys and huge numbers are collected
as problems, so one reading shows all of them. Tags, aliases (nested ones expand exponentially) and
nesting deeper than MAX_DEPTH end the reading, like any syntax error.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import ComposerError

KeyPath = tuple[str | int, ...]
"""Keys and list indices that lead to a value from the top."""

MAX_DEPTH = 32

_NULL, _BOOL, _INT, _FLOAT, _TEXT = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")
)
# (tag, pattern, first characters). Text here, but numbers in YAML 1.1: 010, 0x10, 1:30 and .inf.
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    (_NULL, r"(?:~|null|Null|NULL|)", "~nN"),
    (_BOOL, r"(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
    (_INT, r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)", "-+0123456789"),
    (
        _FLOAT,
        rf"[-+]?(?:{_DIGITS}\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        rf"|{_DIGITS}[eE][-+]?[0-9]+)",
        "-+.0123456789",
    ),
)


@dataclass
class YamlDocument:
    """The value of a text, the line (from 1) of every value and key, and the problems."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line, message) of each."""


class _Loader(yaml.SafeLoader):
    """Composes nodes; `_build` makes the values from them, so no tag can construct an object."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own layout

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            kind = "alias" if isinstance(event, yaml.AliasEvent) else "tag"
            raise ComposerError(
                None, None, f"a YAML {kind} is not supported; write the value out", event.start_mark
            )
        if self._depth == MAX_DEPTH:  # PyYAML recurses, and would end with RecursionError.
            raise ComposerError(
                None, None, f"nested deeper than {MAX_DEPTH} levels", event.start_mark
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # In single quotes PyYAML writes these line ends unescaped, and reads them as spaces.
        style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
        return self.represent_scalar(_TEXT, text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


# Reader and writer share the patterns, so the writer quotes any text that the reader would convert.
for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            _tag, re.compile(rf"(?:{_pattern})\Z"), [*_first, *([""] if _tag == _NULL else [])]
        )


def read_yaml(text: str) -> YamlDocument:
    """Read one YAML document. Raises yaml.YAMLError if the reading cannot continue."""
    document = YamlDocument()
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    finally:
        loader.dispose()
    document.value = None if node is None else _build(node, (), document)
    return document


def dump_yaml(value: Mapping[str, Any]) -> str:
    """YAML text in the order of the mapping. `read_yaml` of it gives an equal value."""
    return yaml.dump(
        dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, indent=2
    )


def _build(node: yaml.Node, path: KeyPath, document: YamlDocument) -> Any:
    # For a mapping's value the line of its key is already there, and is the better one to show.
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, index), document) for index, item in enumerate(node.value)]
    return _build_scalar(node, document)


def _build_mapping(node: yaml.MappingNode, path: KeyPath, document: YamlDocument) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value
        # SafeConstructor would keep the last of two equal keys, and silently drop the first.
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TEXT:
            document.problems.append((line, f"a key must be text, found {key!r}; quote it"))
        elif key in result:
            first = document.lines[(*path, key)]
            document.problems.append(
                (line, f"{dotted((*path, key))} is given twice, first on line {first}; keep one")
            )
        else:
            document.lines[(*path, key)] = line
            result[key] = _build(value_node, (*path, key), document)
    return result


def _build_scalar(node: yaml.Node, document: YamlDocument) -> Any:
    text: str = node.value
    if node.tag == _NULL:
        return None
    if node.tag == _BOOL:
        return text.lower() == "true"
    if node.tag not in (_INT, _FLOAT):
        return text
    try:  # int() and float() accept the underscores of 1_000.
        number: int | float = int(text) if node.tag == _INT else float(text)
    except ValueError:  # More digits than Python converts (4,300).
        number = math.inf
    if math.isinf(number):
        line = node.start_mark.line + 1
        document.problems.append(
            (line, f"{text[:40]} is too large a number; quote it if it is text")
        )
    return number


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0)` as `a.b[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
