"""The starting file that `txl config init` writes: every setting, documented, with its default.

The text above a setting is the docstring under it in the code. Settings that most runs leave as
they are commented out.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from txl_dist.config.run_config import RunConfig
from txl_dist.config.yaml_file import dump_yaml

IN_USE = {
    "directory": (),
    "seed": (),
    "data": ("path", "num_lanes", "tgt_len"),
    "model": ("n_layer", "d_model", "n_head", "d_head", "d_inner", "mem_len", "dropout"),
    "optimizer": ("lr", "schedule", "warmup_steps"),
    "training": ("num_steps", "checkpoint_interval_steps"),
    "divergence": ("policy",),
    "evaluation": ("interval_steps",),
    "tracking": ("experiment",),
    "deepspeed": ("zero_stage",),
    "ray": ("max_restarts",),
}
"""The settings that are not in comments: at least one of every section."""

START = {"optimizer": {"lr": 1e-3, "warmup_steps": 200}, "training": {"num_steps": 1000}}
"""For a first run of the small model that is the default; `lr` is the paper's for large models."""


def starting_file(name: str) -> str:
    """YAML of a run `name`, which trains on data/NAME and writes to runs/NAME.

    `name` must not contain characters with a meaning in YAML or in paths.
    """
    config = RunConfig.model_validate(
        {
            "directory": f"runs/{name}",
            "data": {"path": f"data/{name}"},
            **START,
        }
    )
    header = f"""\
# The settings of one run. Those in comments have their default; remove the "# " to change one.
#
#   txl prepare CORPUS --out data/{name} --split valid=0.01
#   txl config validate {name}.yaml
#   txl train {name}.yaml
#
# Configs of other sizes, to compare: txl config list. For a larger model: a lower optimizer.lr, a
# longer warm-up. The run warns if the loss shows that it learns nothing from the context.

"""
    values = config.model_dump(mode="json")
    return header + "\n".join(_settings(config, values)) + "\n"


def _settings(config: RunConfig, values: Mapping[str, Any]) -> Iterator[str]:
    documentation = documentation_of(RunConfig)
    for name, value in values.items():
        if name in documentation:
            yield from _setting(name, value, documentation[name], indent="", in_use=name in IN_USE)
            continue
        section = getattr(config, name)
        yield from ("", f"{name}:")
        for key, text in documentation_of(type(section)).items():
            in_use = key in IN_USE.get(name, ())
            yield from _setting(key, value[key], text, indent="  ", in_use=in_use)


def _setting(name: str, value: Any, text: str, *, indent: str, in_use: bool) -> Iterator[str]:
    comment = f"{indent}# "
    yield from textwrap.wrap(text, 100, initial_indent=comment, subsequent_indent=comment)
    # Collections in one line, which is also JSON; numbers and text as in the run directory.
    is_collection = isinstance(value, list | dict)
    # dump_yaml would quote some names, such as `on`, which other readers of YAML take for true.
    shown = (
        json.dumps(value) if is_collection else dump_yaml({"": value}).partition(": ")[2].strip()
    )
    yield f"{indent if in_use else comment}{name}: {shown}"


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
