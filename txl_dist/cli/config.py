"""`txl config`: look at a run's settings before the run."""

from pathlib import Path
from typing import Annotated

import typer

from txl_dist.cli.paths import local_path_parser

app = typer.Typer(help="Show and check run configs.", no_args_is_help=True)

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of one run.", parser=local_path_parser())
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[k.e.y=value ...]", help="Settings put over the file's, in YAML."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@app.command()
def show(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print the resolved config: the file, the overrides and every default. Secrets are hidden.

    Example: txl config show configs/quickstart.yaml optimizer.lr=1e-3 model.n_layer=6
    """
    import json

    from txl_dist.config.config_file import dump_run_config, load_run_config, redact

    resolved = load_run_config(config, overrides or ())
    if as_json:
        print(json.dumps(redact(resolved.model_dump(mode="json"))))
    else:
        print(dump_run_config(resolved), end="")


@app.command()
def validate(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Check a config without running it; exit code 2 and every problem if it is wrong.

    Example: txl config validate configs/quickstart.yaml
    """
    import json

    from txl_dist.config.config_file import load_run_config

    resolved = load_run_config(config, overrides or ())
    if as_json:
        print(json.dumps({"valid": True, "config": str(config), "directory": resolved.directory}))
    else:
        print(f"{config} is a valid config; the run would be kept in {resolved.directory}")
