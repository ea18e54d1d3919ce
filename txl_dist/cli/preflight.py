"""Before a run: `txl config`, `txl estimate` and `txl doctor`."""

import itertools
import json
import re
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from data_pipeline.shards import MANIFEST_NAME
from data_pipeline.system.files import write_file
from txl_dist.cli.options import AsJson, ConfigPath, Overrides, print_result, require_local, running
from txl_dist.errors import ConfigError

app = typer.Typer(help="Write, show and check run configs.", no_args_is_help=True)


@app.command()
def init(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the run, or the path of the file.")
    ],
    *,
    recipe: Annotated[
        Literal["modern", "paper"],
        typer.Option(help="model.recipe: what decides the block and the optimizer."),
    ] = "modern",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="The dataset, which also decides the number of lanes.",
            show_default="data/NAME",
        ),
    ] = None,
) -> None:
    """Write NAME.yaml: a small model, with every setting documented. It overwrites nothing.

    Example: txl config init my-run --data data/stdlib
    """
    from txl_dist.config.starting_file import starting_file

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
    manifest = None
    if data is not None or (Path("data") / path.stem / MANIFEST_NAME).is_file():
        from data_pipeline.shards.manifest import load_manifest

        manifest = load_manifest(data or f"data/{path.stem}")
    write_file(path, starting_file(path.stem, recipe, data=data, manifest=manifest).encode())
    print(f"wrote {path}; check it after your changes: txl config validate {path}")
    if manifest is None:
        print(
            f"There is no data/{path.stem} yet. If it will have less than a megabyte of text, "
            "prepare it first: the number of lanes depends on it"
        )


@app.command("list")
def list_() -> None:
    """List the configs that the package brings. Every CONFIG can be one of these names.

    Example: txl config list
    """
    from txl_dist.config.config_file import named_configs

    _print_files(named_configs())
    print("\nAll settings of one: txl config show NAME. To change some: txl train NAME key=value")


@app.command()
def deploy(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Which file. Without it, all are listed."),
    ] = None,
) -> None:
    """Print a deployment file (Slurm, Kubernetes, clouds, image).

    Example: txl config deploy slurm > slurm.sh
    """
    directory = Path(__file__).parents[2] / "cluster" / "deploy"  # in a wheel, too
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = {path.relative_to(directory).with_suffix("").as_posix(): path for path in paths}
    if name is None:
        _print_files(dict(sorted(files.items(), key=lambda item: (item[0].count("/"), item[0]))))
        print("\nTo write one: txl config deploy NAME > FILE. Which to take: NAME is README")
        return
    path = files.get(name) or directory / name  # with or without the suffix
    if path not in paths:
        raise ConfigError(f"no deployment file {name}; expected one of {', '.join(sorted(files))}")
    print(path.read_text("utf-8"), end="")


def _print_files(files: dict[str, Path]) -> None:
    """Print names, each with the first sentence of the header of its file."""
    width = max(map(len, files)) + 2
    for name, path in files.items():
        lines = path.read_text("utf-8").removeprefix("#!/bin/bash\n").splitlines()
        header = itertools.takewhile(lambda line: line.strip("# "), lines)
        text = " ".join(line.removeprefix("#").strip() for line in header)
        first, *_ = re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)
        print(f"{name:<{width}}{first}")


@app.command()
def show(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print a config with the overrides and every default. Secrets are hidden.

    Example: txl config show quickstart optimizer.lr=1e-3 model.n_layer=6
    """
    from txl_dist.config.config_file import dump_run_config
    from txl_dist.config.redaction import redact_values
    from txl_dist.training.origin import load_run_config

    resolved = load_run_config(config, overrides or ())
    if as_json:
        print(json.dumps(redact_values(resolved.model_dump(mode="json"))))
    else:
        print(dump_run_config(resolved), end="")


@app.command()
def validate(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Check a config without running it. If it is invalid, list every problem; exit code 2.

    Example: txl config validate quickstart
    """
    from txl_dist.training.origin import load_run_config

    resolved = load_run_config(config, overrides or ())
    content = {
        "valid": True,
        "config": str(config),
        "directory": resolved.directory,
        "warnings": resolved.warnings,
    }
    lines = [f"{config} is a valid config; the run would write to {resolved.directory}"]
    lines += [f"WARNING: {warning}" for warning in resolved.warnings]
    print_result(content, "\n".join(lines), as_json=as_json)


def estimate(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs, one for each rank.")],
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=1e6,
            help="Peak of one GPU.",
            show_default="A100: 312 bf16, 19.5 fp32; of a CPU, measured",
        ),
    ] = None,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Device type of the ranks.")
    ] = "cuda",
    utilisation: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Fraction of the peak (MFU).")
    ] = 0.3,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, FLOPs and time of a run on any number of GPUs.

    Prints GPU memory by rank and ZeRO stage, and legal world sizes. Reads the manifest of the
    dataset if it is there; else set model.vocab_size.

    Example: txl estimate paper/wt103-base model.vocab_size=267735 --gpus 4
    """
    from txl_dist.estimate import run_estimate
    from txl_dist.training.origin import load_run_config

    run = run_estimate.with_data(load_run_config(config, overrides or ()))
    result = run_estimate.estimate_run(
        run,
        gpus=gpus,
        peak_tflops=peak_tflops or run_estimate.peak_of(device, run.precision),
        utilisation=utilisation,
        device=device,
    )
    print_result(result.to_json(), "\n".join(run_estimate.lines_of(result)), as_json=as_json)


# --- txl doctor -----------------------------------------------------------------------------------

CheckName = StrEnum(
    "CheckName",
    ["versions", "devices", "network", "storage", "tracking", "exposure"],
)


def doctor(
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray|ADDRESS",
            help="The address of a running Ray cluster: check every node. ray: a Ray started for "
            "this command.",
            show_default="this machine, without Ray",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A run directory, which exists or will be created: check that all nodes can use "
            "it. A probe file is written there and removed.",
            show_default="runs, without --on",
            parser=require_local,
        ),
    ] = None,
    skip: Annotated[
        list[CheckName] | None, typer.Option(help="A check to leave out; can be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine or all nodes of a cluster before a run.

    Checks versions, devices, the address of the host's name, storage, tracking and exposure, and on
    a cluster whether its nodes are equal. Exit code 1 if a problem was found. Nothing is changed.

    Example: txl doctor --on 10.0.0.1:6379 --run /shared/runs/first
    """
    from txl_dist.launch import doctor as checks
    from txl_dist.launch.launcher import find_launcher

    run = run or ("runs" if on in (None, "processes") else None)
    # Ray's workers have another working directory.
    run = run and str(Path(run).expanduser().absolute())
    request = checks.DoctorRequest(run=run, skip=frozenset(map(str, skip or ())))
    launcher = find_launcher(on or "processes")
    with running(f"checking {on or 'this machine'}"):
        findings = launcher.check_nodes(request)
    count = checks.num_problems(findings)
    content = {"ok": not count, "num_problems": count, "findings": [*map(asdict, findings)]}
    print_result(content, checks.report(findings), as_json=as_json)
    if count:
        raise typer.Exit(1)
