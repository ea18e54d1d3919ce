"""`txl config`: write, show or check the settings of a run before it starts."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from txl_dist.cli.options import AsJson, ConfigPath, Overrides

app = typer.Typer(help="Write, show and check run configs.", no_args_is_help=True)


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the run, or the path of the file.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Write NAME.yaml: a small model, with every setting documented. It overwrites nothing.

    Example: txl config init my-run
    """
    from data_pipeline.system.files import write_file
    from txl_dist.config.starting_file import starting_file
    from txl_dist.errors import ConfigError

    path = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", path.stem, re.ASCII):
        raise ConfigError(
            f"txl config init {name!r}: the name of the run becomes part of paths. Use letters, "
            "digits, dots, hyphens and underscores, beginning with a letter or digit"
        )
    if path.exists():
        raise ConfigError(f"{path} exists already. Choose another name, or remove the file")
    if not path.parent.is_dir():
        raise ConfigError(f"the directory {path.parent} does not exist; create it first")
    write_file(path, starting_file(path.stem).encode())
    if as_json:
        print(json.dumps({"config": str(path)}))
    else:
        print(f"wrote {path}; check it after your changes: txl config validate {path}")


@app.command()
def show(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print the resolved config: the file, the overrides and every default. Secrets are hidden.

    Example: txl config show configs/quickstart.yaml optimizer.lr=1e-3 model.n_layer=6
    """
    from txl_dist.config.config_file import dump_run_config, load_run_config
    from txl_dist.config.redaction import redact

    resolved = load_run_config(config, overrides or ())
    if as_json:
        print(json.dumps(redact(resolved.model_dump(mode="json"))))
    else:
        print(dump_run_config(resolved), end="")


@app.command()
def validate(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Check a config without running it. If it is invalid, list every problem; exit code 2.

    Example: txl config validate configs/quickstart.yaml
    """
    from txl_dist.config.config_file import load_run_config

    resolved = load_run_config(config, overrides or ())
    if as_json:
        print(json.dumps({"valid": True, "config": str(config), "directory": resolved.directory}))
    else:
        print(f"{config} is a valid config; the run would write to {resolved.directory}")
