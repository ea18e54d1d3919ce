"""The file that `txl config init` writes: a small model, with every setting documented.

Every setting has its value and, as its documentation, the docstring under it in the code. What the
recipe decides is commented out: a value in the file would win over that of another recipe.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data_pipeline.system.remote_path import dataset_path
from txl_dist.config.config_file import dump_yaml, with_recipe
from txl_dist.config.data_config import lanes_for
from txl_dist.config.run_config import RunConfig

if TYPE_CHECKING:
    from data_pipeline.shards.manifest import ShardManifest  # imports numpy

START: dict[str, dict[str, dict[str, Any]]] = {
    "modern": {"model": {"d_inner": 342}, "optimizer": {"warmup_steps": 20}},
    "paper": {"optimizer": {"lr": 2e-3, "warmup_steps": 100}},
}
"""By recipe: what the model of the default size needs besides. As in configs/modern/quickstart.yaml
and configs/quickstart.yaml."""
START_ROWS, START_TGT_LEN = 32, 64
LONGER = 4
"""How many times longer the segments of a run of 3,000 steps and more should be."""
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
    longer = ""
    if recipe == "modern" and rows == START_ROWS:  # measured with this recipe, on long texts
        tgt_len = LONGER * START_TGT_LEN
        long_lanes, long_rows = lanes_for(tokens, rows=START_ROWS // LONGER, tgt_len=tgt_len)
        longer = (
            f"\n# For 3,000 steps and more, longer segments: tgt_len: {tgt_len}, "
            f"lanes_per_step: {long_rows}, num_lanes: {long_lanes}."
        )
    header = f"""\
# The settings of one run: a small model, for minutes on two CPU cores. Those in comments have the
# value of model.recipe or their default; remove the "# " to change one.
#
#   txl prepare CORPUS --out {data} --split valid=0.01
#   txl config validate {name}.yaml
#   txl train {name}.yaml
#
# {lanes} lanes for {text} (docs/how_to/choose_settings.md).{longer}
# The other recipe: txl config init NAME --recipe {other}. Other sizes, to compare: txl config list.

"""
    return header + "\n".join(_settings({"directory": f"runs/{name}", **given})) + "\n"


def _settings(given: dict[str, Any]) -> Iterator[str]:
    """The lines of all settings; those that are not given are comments."""
    config = RunConfig.model_validate(with_recipe(given))
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
