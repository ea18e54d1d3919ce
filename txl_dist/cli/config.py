"""`txl config`: show or check the settings of a run before it starts."""

import json

import typer

from txl_dist.cli.options import AsJson, ConfigPath, Overrides

app = typer.Typer(help="Show and check run configs.", no_args_is_help=True)


@app.command()
def show(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print the resolved config: the file, the overrides and every default. Secrets are hidden.

    Example: txl config show configs/quickstart.yaml optimizer.lr=1e-3 model.n_layer=6
    """
    from txl_dist.config.config_file import dump_run_config, load_run_config, redact

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
