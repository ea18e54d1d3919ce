"""YAML 1.2 of config files, by ruamel.yaml: values with the line of each, and its dump.

Not supported, and refused with the line: repeated keys, keys that are not text, tags, aliases
(nested ones expand exponentially), and numbers that are not finite.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.tokens import TagToken

from txl_dist.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Keys and list indices that lead to a value from the top."""

MAX_BYTES = 256 * 1024
"""A longer file is not a run config, and is not read."""
_TEXT = "tag:yaml.org,2002:str"


class YamlTextError(Exception):
    """Text that cannot be read. `place` is `:LINE:COLUMN`, from 1, or empty."""

    def __init__(self, message: str, mark: Any = None) -> None:
        super().__init__(
            f"not valid YAML: {message}. Quote text that contains ': ', '#' or brackets, and "
            "indent with spaces"
        )
        self.place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""


@dataclass
class YamlDocument:
    """The value of a text, and the line (from 1) of every value and key."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)


class _Representer(SafeRepresenter):
    def represent_str(self, text: str) -> Any:
        # Without double quotes these line ends are written unescaped, and read as spaces.
        style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
        return self.represent_scalar(_TEXT, text, style)


_Representer.add_representer(str, _Representer.represent_str)


def _yaml() -> YAML:
    yaml: Any = YAML(typ="safe", pure=True)  # its attributes have no declared types
    yaml.Representer = _Representer
    yaml.allow_duplicate_keys = True  # `_record_lines` refuses them, without their values.
    yaml.default_flow_style, yaml.width = False, 100
    yaml.sort_base_mapping_type_on_output = False
    return yaml


def read_yaml(text: str) -> YamlDocument:
    """Read one YAML document. Raises YamlTextError."""
    yaml = _yaml()
    try:
        for token in yaml.scan(text):
            if isinstance(token, TagToken):
                raise YamlTextError(
                    "a YAML tag is not supported; write the value out", token.start_mark
                )
        node = yaml.compose(text)
        if node is None:
            return YamlDocument()
        lines: dict[KeyPath, int] = {}
        _record_lines(node, (), lines, set())
        value = yaml.constructor.construct_document(node)
        json.dumps(value, allow_nan=False)  # raises ValueError
        return YamlDocument(value, lines)
    except MarkedYAMLError as error:
        raise YamlTextError(str(error.problem), error.problem_mark) from None
    except (YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise YamlTextError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise YamlTextError("nested too deeply") from None


def dump_yaml(value: Mapping[str, Any]) -> str:
    """YAML text in the order of the mapping. `read_yaml` of it gives an equal value."""
    text = io.StringIO()
    _yaml().dump(dict(value), text)
    return text.getvalue()


def _record_lines(node: Node, path: KeyPath, lines: dict[KeyPath, int], seen: set[int]) -> None:
    """Add the lines of a composed node and of all in it. Refuses what is not supported."""
    mark = node.start_mark
    if id(node) in seen:  # ruamel.yaml resolves an alias to the node of its anchor
        raise YamlTextError("an anchor with an alias is not supported; write it out", mark)
    seen.add(id(node))
    # For a mapping's value the line of its key is already there: the better one to show.
    lines.setdefault(path, mark.line + 1)
    if isinstance(node, SequenceNode):
        for number, item in enumerate(node.value):
            _record_lines(item, (*path, number), lines, seen)
    elif isinstance(node, MappingNode):
        for key_node, value_node in node.value:
            key, mark = key_node.value, key_node.start_mark
            if key_node.tag != _TEXT:
                raise YamlTextError(f"a key must be text, found {key!s:.40}; quote it", mark)
            if first := lines.get((*path, key)):
                name = dotted((*path, key))
                raise YamlTextError(f"{name} is given twice, first on line {first}; keep one", mark)
            lines[(*path, key)] = mark.line + 1
            _record_lines(value_node, (*path, key), lines, seen)
    elif str(node.tag).endswith(":timestamp"):
        node.tag = _TEXT


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0)` as `a.b[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_text(path: Path) -> str:
    """The text of a config file. Raises ConfigError if it is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES:,} bytes: not a run config")
        # Some Windows editors start a file with a byte order mark; "utf-8-sig" removes it.
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a text file in UTF-8: {error}") from None
