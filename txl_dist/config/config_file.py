"""Run configs as files: read, changed by overrides, checked, and written.

`load_run_config` reads one YAML file, applies `a.b.c=value` overrides and validates the result as a
`RunConfig`. It reports all wrong settings together, each with its line or override: first those of
single settings, and when there are none, those between settings. The rules of YAML are in
`yaml_file.py`.

`starting_file` is the file that `txl config init` writes: every setting with its value and, as its
documentation, the docstring under it in the code. What the recipe decides is commented out: a value
in the file would win over that of another recipe.
"""

import ast
import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from data_pipeline.system.remote_path import dataset_path
from txl_dist.config import optimizer_config
from txl_dist.config.data_config import lanes_for
from txl_dist.config.named_configs import find_config
from txl_dist.config.redaction import redact, redact_field
from txl_dist.config.removed import PAGE, SETTINGS, without_removed
from txl_dist.config.run_config import RunConfig
from txl_dist.config.yaml_file import (
    KeyPath,
    YamlTextError,
    dotted,
    dump_yaml,
    read_text,
    read_yaml,
)
from txl_dist.errors import ConfigError
from txl_dist.model import config as model_config

if TYPE_CHECKING:
    from data_pipeline.shards.manifest import ShardManifest  # imports numpy

_REQUIRED = {"directory": "", "data": {"path": ""}, "training": {"num_steps": 1}}
"""The settings without a default, with some legal value for each."""

Scalar = str | int | float | bool | None


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
    return dump_yaml(redact(config.model_dump(mode="json")))


def flatten_config(config: RunConfig) -> dict[str, Scalar]:
    """All settings by dotted name, e.g. `optimizer.lr`. Lists are JSON text, secrets are `***`."""
    return flatten_settings(redact(config.model_dump(mode="json")))


def default_settings() -> dict[str, Scalar]:
    """All settings that have a default, by dotted name."""
    settings = flatten_config(RunConfig.model_validate(_REQUIRED))
    required = flatten_settings(_REQUIRED)
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
            value = json.dumps(_with_recipe(self.value))
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
        """The override or the line that set `path`, or the nearest section above it."""
        above = (path[:length] for length in range(len(path), 0, -1))
        return next((self._origins[key] for key in above if key in self._origins), str(self.path))


def _with_recipe(value: dict[str, Any]) -> dict[str, Any]:
    """The config with the settings of its `model.recipe` for those that it leaves out.

    A section without any setting is YAML's null: all its settings may be in comments.
    """
    sections = RunConfig.model_validate(_REQUIRED).model_dump()
    result = {
        key: {} if it is None and isinstance(sections.get(key), dict) else it
        for key, it in value.items()
    }
    model = result.get("model")
    recipe = model.get("recipe") if isinstance(model, dict) else None
    for name, recipes in (("model", model_config.RECIPES), ("optimizer", optimizer_config.RECIPES)):
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
            yield f"unknown key {name}; {_nearest_key(path)}"
    elif kind == "missing":
        yield f"{name} is missing; give it a value (example: txl config show quickstart)"
    elif kind in ("model_type", "dataclass_type", "dict_type"):
        yield f"{name} is a section; write its keys below it, found {_show(name, value)}"
    else:
        # pydantic's text, such as "Input should be greater than 0", fitted into our sentence.
        rule = str(error["msg"])
        rule = (rule[:1].lower() + rule[1:]).replace("input", "it", 1)
        is_per_layer = name == "model.mem_len" and isinstance(value, list)
        hint = "; lengths per layer are shares of it, model.mem_shares" if is_per_layer else ""
        yield f"{name} is {_show(name, value)}; {rule}{hint}"


def _nearest_key(path: KeyPath) -> str:
    """A hint for an unknown key: the same one in another section, or a similar one."""
    legal = [*flatten_settings(_REQUIRED), *default_settings(), "data.mixture.NAME.weight"]
    same = [key for key in legal if key.endswith(f".{path[-1]}")]
    nearest = same or difflib.get_close_matches(dotted(path), legal, n=1)
    return f"did you mean {nearest[0]}?" if nearest else "all settings: txl config show quickstart"


def _show(name: str, value: Any) -> str:
    """The value as JSON, shortened, and hidden if `name` is secret."""
    text = json.dumps(redact_field(name.rpartition(".")[2], value), ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


START: dict[str, dict[str, dict[str, Any]]] = {
    "modern": {"model": {"d_inner": 342}, "optimizer": {"warmup_steps": 20}},
    "paper": {"optimizer": {"lr": 2e-3, "warmup_steps": 100}},
}
"""By recipe: what the model of the default size needs besides. As in configs/modern/quickstart.yaml
and configs/quickstart.yaml."""
START_ROWS, START_TGT_LEN = 32, 64
WORD_CUTOFFS = (20_000, 40_000, 200_000)
"""The paper's for WikiText-103: the softmax of all words would take nearly all of the time."""


def starting_file(
    name: str,
    recipe: str = "modern",
    *,
    data: str | None = None,
    manifest: "ShardManifest | None" = None,
) -> str:
    """YAML of a run `name`, which trains on `data`, by default data/NAME, and writes to runs/NAME.

    `name` must not contain characters with a meaning in YAML or in paths. `manifest` is that of
    `data`, if it exists. Raises DataError if it has no split `train`.
    """
    data = data or f"data/{name}"
    tokens = manifest.split("train", dataset_path(data)).tokens if manifest else None
    lanes, rows = lanes_for(tokens, rows=START_ROWS, tgt_len=START_TGT_LEN)
    given: dict[str, dict[str, Any]] = {
        "data": {
            "path": data, "num_lanes": lanes, "lanes_per_step": rows, "tgt_len": START_TGT_LEN
        },
        "model": {"recipe": recipe},
        "training": {"num_steps": 800, "checkpoint_interval_steps": 100},
        "evaluation": {"interval_steps": 400, "max_tokens": 200_000},
        "tracking": {"experiment": name},
    }  # fmt: skip
    for section, settings in START[recipe].items():
        given[section] = given.get(section, {}) | settings
    if manifest and manifest.settings.tokenizer == "word":
        given["model"]["cutoffs"] = [id_ for id_ in WORD_CUTOFFS if id_ < manifest.vocab_size]
    other = next(each for each in START if each != recipe)
    text = "any long text; for a shorter one run txl config init after txl prepare"
    if tokens is not None:
        text = f"{tokens:,} training tokens"
    header = f"""\
# The settings of one run: a small model, for minutes on two CPU cores. Those in comments have the
# value of model.recipe or their default; remove the "# " to change one.
#
#   txl prepare CORPUS --out {data} --split valid=0.01
#   txl config validate {name}.yaml
#   txl train {name}.yaml
#
# {lanes} lanes for {text} (docs/how_to/choose_settings.md).
# The other recipe: txl config init NAME --recipe {other}. Other sizes, to compare: txl config list.

"""
    return header + "\n".join(_settings({"directory": f"runs/{name}", **given})) + "\n"


def _settings(given: dict[str, Any]) -> Iterator[str]:
    """The lines of all settings; those that are not given are comments."""
    config = RunConfig.model_validate(_with_recipe(given))
    documentation = documentation_of(RunConfig)
    for name, value in config.model_dump(mode="json").items():
        if not isinstance(value, dict):
            yield from _setting(name, value, documentation[name], indent="", in_use=name in given)
            continue
        yield from ("", f"{name}:")
        for key, text in documentation_of(type(getattr(config, name))).items():
            in_use = key in given.get(name, {})
            yield from _setting(key, value[key], text, indent="  ", in_use=in_use)


def _setting(name: str, value: Any, text: str, *, indent: str, in_use: bool) -> Iterator[str]:
    comment = f"{indent}# "
    yield from textwrap.wrap(text, 100, initial_indent=comment, subsequent_indent=comment)
    # JSON is YAML, but text without quotes is easier to read where YAML allows it.
    line = json.dumps(value)
    if isinstance(value, str | float):
        line = dump_yaml({"": value}).partition(": ")[2].strip()
    yield f"{indent if in_use else comment}{name}: {line}"


def documentation_of(section: type) -> dict[str, str]:
    """The docstring under each setting of a section, in their order."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts
