"""A small, strict YAML: mappings, lists, text, numbers, true/false, null; each with its line.

PyYAML reads YAML 1.1, where `no` is false, `1e-3` is text, `010` is eight and `1:30` is ninety,
and its full language runs code (tags) and grows without bound (aliases). Here the scalar rules
are those of YAML 1.2, and tags, anchors, aliases, merge keys and repeated keys are refused. All
problems are collected, so that one reading shows them all; only broken syntax stops at the first.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys and list positions from the top."""

MAX_DEPTH = 32

_NULL, _BOOL, _INT, _FLOAT, _TEXT = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")
)
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
    """What a text says, the line (from 1) of every value and key, and what is wrong with it."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line, message) of everything refused."""


class _Loader(yaml.SafeLoader):
    """Composes nodes only; `_Builder` makes the values. Nothing is constructed by tag."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own layout

    def __init__(self, text: str, document: YamlDocument) -> None:
        super().__init__(text)
        self._document = document
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        mark: Any = event.start_mark
        line = mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            self.get_event()
            self._refuse(line, f"the alias *{event.anchor} is refused; repeat the value instead")
            return yaml.ScalarNode(_NULL, "", mark, mark)
        if event.anchor is not None:
            self._refuse(line, f"the anchor &{event.anchor} is refused; write the value out")
            event.anchor = None
        if event.tag is not None:
            self._refuse(line, f"the tag {event.tag!r} is refused; write plain values only")
            event.tag = None
            if isinstance(event, yaml.ScalarEvent):
                event.implicit = (True, False)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"line {line}: nested deeper than {MAX_DEPTH} levels")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def _refuse(self, line: int, message: str) -> None:
        self._document.problems.append((line, message))


class _Dumper(yaml.SafeDumper):
    """Quotes what any YAML, 1.1 or ours, would take for something other than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes these line ends unescaped between single quotes and reads them as spaces.
        style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
        return self.represent_scalar(_TEXT, text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            _tag, re.compile(rf"(?:{_pattern})\Z"), [*_first, *([""] if _tag == _NULL else [])]
        )


def read_yaml(text: str) -> YamlDocument:
    """The value of one YAML document. Raises yaml.YAMLError where the syntax itself is broken."""
    document = YamlDocument()
    loader = _Loader(text, document)
    try:
        node = loader.get_single_node()
    finally:
        loader.dispose()
    document.value = None if node is None else _build(node, (), document)
    return document


def dump_yaml(value: Mapping[str, Any]) -> str:
    """YAML text in the mapping's own order, which `read_yaml` reads back to the same value."""
    return yaml.dump(
        dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, indent=2
    )


def _build(node: yaml.Node, path: KeyPath, document: YamlDocument) -> Any:
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, place), document) for place, item in enumerate(node.value)]
    return _build_scalar(node, document)


def _build_mapping(node: yaml.MappingNode, path: KeyPath, document: YamlDocument) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value
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
    try:
        number: int | float = int(text) if node.tag == _INT else float(text)
    except ValueError:  # more digits than Python converts
        number = math.inf
    if math.isinf(number):
        line = node.start_mark.line + 1
        document.problems.append(
            (line, f"{text[:40]} is too large a number; quote it if it is text")
        )
    return number


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0)` as people write it: `a.b[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
