"""Run configs as files: found, read, changed by overrides, checked, and written.

`load_run_config` reads one YAML file, applies `a.b.c=value` overrides and validates the result as a
`RunConfig`. It reports all wrong settings together, each with its line or override: first those of
single settings, and when there are none, those between settings.

A config of the package has a name: its path below configs/ without the suffix, such as `quickstart`
or `paper/wt103-base`. In the repository the files are in configs/, which the wheel has as
txl_dist/configs (setup.py).

YAML is 1.2, by ruamel.yaml. Refused, with the line: repeated keys, keys that are not text, tags,
anchors and aliases (nested ones expand exponentially), and numbers that are not finite.
"""

import difflib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.tokens import AliasToken, AnchorToken, TagToken

from data_pipeline.system.path_kind import PathKind, kind_of
from txl_dist.config.redaction import redact, redact_field, redact_values
from txl_dist.config.removed import PAGE, SETTINGS, without_removed
from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import OPTIMIZER_RECIPES
from txl_dist.errors import ConfigError
from txl_dist.model import config as model_config

REQUIRED = {"directory": "runs/NAME", "data": {"path": ""}, "training": {"num_steps": 1}}
"""The settings without a default, with some legal value for each."""
MAX_BYTES = 256 * 1024
"""A longer file is not a run config, and is not read."""
ALIASES = {
    "batch_size": "data.num_lanes, or data.lanes_per_step",
    "hidden_size": "model.d_model",
    "learning_rate": "optimizer.lr",
    "max_steps": "training.num_steps",
    "seq_len": "data.tgt_len",
}
"""Our settings by the names that others give them."""
EXPECTED = {
    "tracking.uri": "the address of a server or database, such as http://HOST:PORT or "
    "sqlite:///PATH/mlflow.db",
    "tracking.experiment": "letters, digits, spaces and the characters . : @ / + - _",
    "training.checkpoint_url": "a URL such as s3://BUCKET/PATH or gs://BUCKET/PATH",
}
"""What settings that have a pattern can be."""
_PACKAGE = Path(__file__).parents[1]
_TEXT = "tag:yaml.org,2002:str"

Scalar = str | int | float | bool | None
KeyPath = tuple[str | int, ...]
"""Keys and list indices that lead to a value from the top."""


def load_run_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda settings: settings,
) -> RunConfig:
    """Load and check the YAML file `path`, with `a.b.c=value` overrides.

    `path` can also be the name of one of the package's configs, such as `quickstart`. `complete`
    adds settings to those that the file and the overrides have, before they are checked.
    Raises ConfigError, which lists every problem with its line or override.
    """
    source = _Source(find_config(path))
    for override in overrides:
        source.override(override)
    source.value = complete(without_removed(source.value))
    return source.validated()


def dump_run_config(config: RunConfig) -> str:
    """The resolved config as YAML, in schema order. `load_run_config` of it gives an equal config.

    Secrets become `***`, because run directories are copied and uploaded. Set them in the
    environment (`MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_PASSWORD`, `MLFLOW_TRACKING_TOKEN`).
    """
    return dump_yaml(redact_values(config.model_dump(mode="json")))


def flatten_config(config: RunConfig) -> dict[str, Scalar]:
    """All settings by dotted name, e.g. `optimizer.lr`. Lists are JSON text, secrets are `***`."""
    return flatten_settings(redact_values(config.model_dump(mode="json")))


def default_settings() -> dict[str, Scalar]:
    """All settings that have a default, by dotted name."""
    settings = flatten_config(RunConfig.model_validate(REQUIRED))
    required = flatten_settings(REQUIRED)
    return {key: value for key, value in settings.items() if key not in required}


def flatten_settings(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The values of nested sections by dotted name; lists are JSON text."""
    flat: dict[str, Scalar] = {}
    for name, value in values.items():
        # Lists stay whole: an index in a name would shift when an entry is added.
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": item for inner, item in flatten_settings(value).items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, list) else value
    return flat


# --- files ----------------------------------------------------------------------------------------


def configs_directory() -> Path:
    """The directory of the package's configs, in a wheel or in a checkout."""
    in_wheel = _PACKAGE / "configs"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / "configs"


@cache
def named_configs() -> dict[str, Path]:
    """Path by name, sorted: first those of the top level."""
    directory = configs_directory()
    paths = [*sorted(directory.glob("*.yaml")), *sorted(directory.glob("*/*.yaml"))]
    return {path.relative_to(directory).with_suffix("").as_posix(): path for path in paths}


def find_config(given: str | Path) -> Path:
    """The file `given`, or the package's config of that name.

    A file wins. `configs/NAME.yaml` is also the name NAME, so that commands of the documents work
    in every directory. Raises ConfigError if there is neither, or if a name may mean two files.
    """
    path = Path(given)
    if path.is_file():
        return path
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    named = named_configs().get(name)
    if named is None:
        kind = kind_of(path)
        found = "does not exist" if kind is PathKind.MISSING else f"is {kind}, not a config file"
        raise ConfigError(f"{path} {found}{_suggestion(path)}")
    # `txl config init quickstart` writes quickstart.yaml.
    namesake = Path(f"{given}.yaml")
    if namesake.is_file() and not namesake.samefile(named):
        raise ConfigError(
            f"{path} is a config of the package, and there is a file {namesake}. Write {namesake} "
            f"for the file, or configs/{name}.yaml for that of the package"
        )
    return named


def _suggestion(path: Path) -> str:
    directory = path if path.is_dir() else path.parent
    files = {config.stem: str(config) for config in directory.glob("*.yaml")}
    names = [name for name in named_configs() if name.endswith(f"/{path.stem}")]
    stem = "config" if (path / "config.yaml").is_file() else path.stem  # of a run directory
    similar = [files[match] for match in difflib.get_close_matches(stem, files, n=1)]
    similar = similar or names or difflib.get_close_matches(path.stem, named_configs(), n=3)
    meant = f"; did you mean {' or '.join(similar)}?" if similar else "."
    return f"{meant} Configs of the package: txl config list"


def read_text(path: Path) -> str:
    """The text of a config file. Raises ConfigError if it is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES:,} bytes: not a run config")
        # Some Windows editors start a file with a byte order mark; "utf-8-sig" removes it.
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a text file in UTF-8: {error}") from None


# --- overrides and checks -------------------------------------------------------------------------


class _Source:
    """A config that is being read: its raw value, and the origin of each part.

    Raises ConfigError if the file or an override cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            document = read_yaml(read_text(path))
        except YamlTextError as error:
            raise ConfigError(f"{path}{error.place}: {error}") from None
        if not isinstance(document.value, dict):
            raise ConfigError(
                f"{path}: a config is a mapping of sections (data, model, training, ...), "
                f"found {_show('', document.value)}. For an example: txl config show quickstart"
            )
        self.value: dict[str, Any] = document.value
        self._origins = {key: f"{path}:{line}" for key, line in document.lines.items() if key}

    def override(self, text: str) -> None:
        """Apply one `a.b.c=value`."""
        name, equals, value_text = text.partition("=")
        parts = tuple(name.strip().split("."))
        origin = f"override {name if equals else redact(text)}"
        if not equals or not all(parts):
            raise ConfigError(f"{origin}: write it as section.key=value, e.g. optimizer.lr=1e-3")
        section = self.value
        for depth, part in enumerate(parts[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                raise ConfigError(f"{origin}: {dotted(parts[:depth])} has a value: no section")
        # A shell has its own comments: `#` is text, and not the end of a value.
        is_text = re.search(r"(^|\s)#", value_text) and value_text.strip()[0] not in "'\"[{"
        try:
            section[parts[-1]] = value_text.strip() if is_text else read_yaml(value_text).value
        except YamlTextError as error:
            raise ConfigError(f"{origin}: {error}") from None
        # The new value replaces everything below it.
        self._origins = {
            path: line for path, line in self._origins.items() if path[: len(parts)] != parts
        }
        self._origins[parts] = origin

    def validated(self) -> RunConfig:
        """The config. Raises ConfigError, which lists every problem with its origin."""
        try:
            # As JSON, because only there strict mode accepts mappings for dataclasses and
            # lists for tuples.
            value = json.dumps(with_recipe(self.value))
            return RunConfig.model_validate_json(value, strict=True)
        except ValidationError as error:
            problems: dict[str, None] = {}
            for details in error.errors(include_url=False):
                # pydantic marks a wrong key of a mapping.
                path = tuple(part for part in details["loc"] if part != "[key]")
                for text in _explain(dict(details), path):
                    problems[f"{self._origin(path)}: {text}"] = None
        if len(problems) > 1:
            problems = {f"{self.path}: {len(problems)} problems": None, **problems}
        raise ConfigError("\n  ".join(problems))

    def _origin(self, path: KeyPath) -> str:
        """The override or the line that set `path`, or the nearest section above it.

        Of a section that is not in the file, the overrides in it.
        """
        below = [origin for key, origin in self._origins.items() if key[: len(path)] == path]
        if path and path not in self._origins and below:
            return ", ".join(below)
        above = (path[:length] for length in range(len(path), 0, -1))
        return next((self._origins[key] for key in above if key in self._origins), str(self.path))


def with_recipe(value: dict[str, Any]) -> dict[str, Any]:
    """The config with the settings of its `model.recipe` for those that it leaves out.

    A section without any setting is YAML's null: all its settings may be in comments.
    """
    sections = RunConfig.model_validate(REQUIRED).model_dump()
    result = {
        key: {} if it is None and isinstance(sections.get(key), dict) else it
        for key, it in value.items()
    }
    model = result.get("model")
    recipe = model.get("recipe") if isinstance(model, dict) else None
    for name, recipes in (("model", model_config.RECIPES), ("optimizer", OPTIMIZER_RECIPES)):
        section = result.get(name, {})
        if isinstance(recipe, str) and recipe in recipes and isinstance(section, dict):
            result[name] = recipes[recipe] | section
    return result


# --- messages made from the errors of pydantic ----------------------------------------------------


def _explain(error: Mapping[str, Any], path: KeyPath) -> Iterator[str]:
    """What is wrong, with the value and the valid values, or the nearest valid name.

    A validator that compares several settings puts each of its problems on a line of its message.
    """
    kind, value, name = error["type"], error["input"], dotted(path)
    if kind == "value_error":
        lines = str(error["msg"]).removeprefix("Value error, ").split("\n")
        yield from (f"{name}: {line}" if name else line for line in lines)
    elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
        if name in SETTINGS:
            yield f"{name}={_show(name, value)} was removed; {SETTINGS[name].instead} ({PAGE})"
        else:
            yield f"unknown key {name}; {nearest_setting(name)}"
    elif kind == "missing":
        yield f"{name} is missing; give it a value (example: txl config show quickstart)"
    elif kind in ("model_type", "dataclass_type", "dict_type"):
        yield f"{name} is a section; write its keys below it, found {_show(name, value)}"
    elif kind == "string_pattern_mismatch" and name in EXPECTED:
        yield f"{name} is {_show(name, value)}; expected {EXPECTED[name]}"
    else:
        # pydantic's text, such as "Input should be greater than 0", fitted into our sentence.
        rule = str(error["msg"])
        rule = (rule[:1].lower() + rule[1:]).replace("input", "it", 1)
        is_per_layer = name == "model.mem_len" and isinstance(value, list)
        hint = "; lengths per layer are shares of it, model.mem_shares" if is_per_layer else ""
        yield f"{name} is {_show(name, value)}; {rule}{hint}"


def nearest_setting(name: str) -> str:
    """A hint for an unknown name: the same one in another section, or a similar one."""
    legal = [*flatten_settings(REQUIRED), *default_settings(), "data.mixture.NAME.weight"]
    last = name.rpartition(".")[2]
    same = [key for key in legal if f".{key}".endswith(f".{last}")]
    same += [ALIASES[last]] if last in ALIASES else []
    sections = {key.partition(".")[0] for key in legal}
    nearest = same or difflib.get_close_matches(name, [*legal, *sections], n=1)
    return f"did you mean {nearest[0]}?" if nearest else "all settings: txl config show quickstart"


def _show(name: str, value: Any) -> str:
    """The value as JSON, shortened, and hidden if `name` is secret."""
    text = json.dumps(redact_field(name.rpartition(".")[2], value), ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- YAML -----------------------------------------------------------------------------------------


_REFUSED = {TagToken: "a YAML tag", AnchorToken: "an anchor", AliasToken: "an alias"}


_QUOTE = "Quote text that contains ': ', '#' or brackets, and indent with spaces"


class YamlTextError(Exception):
    """Text that cannot be read. `place` is `:LINE:COLUMN`, from 1, or empty."""

    def __init__(self, message: str, mark: Any = None, *, advice: str = _QUOTE) -> None:
        super().__init__(f"not valid YAML: {message}. {advice}")
        self.place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""


class YamlDocument(NamedTuple):
    """The value of a text, and the line (from 1) of every value and key."""

    value: Any
    lines: Mapping[KeyPath, int]


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
            if kind := _REFUSED.get(type(token)):
                raise YamlTextError(
                    f"{kind} is not supported; write the value out", token.start_mark
                )
        node = yaml.compose(text)
        lines: dict[KeyPath, int] = {}
        if node is None:
            return YamlDocument(None, {})
        _record_lines(node, (), lines)
        return YamlDocument(yaml.constructor.construct_document(node), lines)
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


def _record_lines(node: Node, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    """Add the lines of a composed node and of all in it. Refuses what is not supported."""
    # For a mapping's value the line of its key is already there: the better one to show.
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, SequenceNode):
        for number, item in enumerate(node.value):
            _record_lines(item, (*path, number), lines)
    elif isinstance(node, MappingNode):
        for key_node, value_node in node.value:
            key, mark = key_node.value, key_node.start_mark
            if key_node.tag != _TEXT:
                raise YamlTextError(f"a key must be text, found {key!s:.40}; quote it", mark)
            if first := lines.get((*path, key)):
                name = dotted((*path, key))
                raise YamlTextError(f"{name} is given twice, first on line {first}; keep one", mark)
            lines[(*path, key)] = mark.line + 1
            _record_lines(value_node, (*path, key), lines)
    elif str(node.tag).endswith(":timestamp"):
        node.tag = _TEXT
    elif str(node.tag).endswith(":float") and not math.isfinite(
        _yaml().constructor.construct_yaml_float(node)
    ):
        message = f"{dotted(path) or 'the value'} is {node.value}"
        raise YamlTextError(message, node.start_mark, advice="A number must be finite")


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0)` as `a.b[0]`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")
