"""`txl config` and `txl estimate`: write, show, check and estimate a run before it starts."""

import json
import re
from pathlib import Path
from typing import Annotated, Literal

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


def estimate(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    gpus: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Numbers of GPUs, one column for each.")
    ],
    peak_tflops: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Peak of one GPU.", show_default="A100: 312 bf16, 19.5 fp32"),
    ] = None,
    utilisation: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Fraction of the peak (MFU).")
    ] = 0.3,
    lanes_per_gpu: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Let the batch grow with the GPUs.",
            show_default="data.num_lanes for every number of GPUs",
        ),
    ] = None,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Device type of the ranks.")
    ] = "cuda",
    as_json: AsJson = False,
) -> None:
    """Estimate GPU memory per rank and ZeRO stage, FLOPs, time of the run, and legal world sizes.

    Reads the manifest of the dataset if it is there; else set model.vocab_size.

    Example: txl estimate configs/paper/wt103-base.yaml model.vocab_size=267735 --gpus 4,60
    """
    numbers = _parse_gpus(gpus)
    from dataclasses import asdict

    from txl_dist.config.config_file import load_run_config
    from txl_dist.estimate.run_estimate import (
        PEAK_TFLOPS,
        Assumptions,
        DataFacts,
        estimate_run,
        lines_of,
    )

    run = load_run_config(config, overrides or ())
    assumptions = Assumptions(
        device=device,
        peak_tflops=peak_tflops,
        utilisation=utilisation,
        lanes_per_gpu=lanes_per_gpu,
    )
    result = estimate_run(run, DataFacts.of(run), gpus=numbers, assumptions=assumptions)
    if not as_json:
        print("\n".join(lines_of(result, assumptions, precision=run.precision)))
        return
    assumed = {**asdict(assumptions), "peak_tflops": peak_tflops or PEAK_TFLOPS[run.precision]}
    print(json.dumps({**result.to_json(), "assumptions": assumed}))


def _parse_gpus(text: str) -> list[int]:
    from txl_dist.errors import ConfigError

    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--gpus {text}: expected numbers from 1 on, separated by commas; write for example "
            "--gpus 8,64,512,4096"
        )
    return sorted({int(part) for part in parts})
