"""`txl bench gpu`: speed, utilisation and memory of the published models on this machine's GPU."""

import json
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from txl_dist.cli.options import AsJson
from txl_dist.cli.paths import local_path_parser
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.bench.gpu import GpuRow, Settings
    from txl_dist.bench.gpu_models import BenchModel

NO_GPU = (
    "skipped: torch finds no GPU on this machine. It needs one with CUDA, its driver, and a torch "
    "that is built for CUDA; `txl doctor` shows what is installed"
)


def gpu(
    *,
    models: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="nvidia-base, wt103-base, ...; default: all."),
    ] = None,
    implementations: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Implementations of attention, or auto; default: all except reference.",
        ),
    ] = None,
    precision: Annotated[
        Literal["bf16", "fp32"], typer.Option(help="Precision of matrix products.")
    ] = "bf16",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of 4 steps; the median counts.")] = 10,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the layers (training.compile).")
    ] = False,
    profile: Annotated[
        bool, typer.Option(help="Also profile a step of the first model with `auto`.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a section for docs/experiments.md.", parser=local_path_parser()),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens/s, MFU and peak memory of training steps, by attention implementation.

    MFU is against the data sheet and against the fastest matrix product measured here. Without a
    GPU it says so and ends with exit code 0.

    Example: txl bench gpu --models nvidia-base,wt103-base --out gpu.md
    """
    import torch

    from txl_dist.bench.gpu import Settings
    from txl_dist.bench.gpu_models import MODELS, data_sheet_flops
    from txl_dist.model.config import ATTENTION_IMPLEMENTATIONS

    chosen_models = _chosen("models", models, [*MODELS])
    chosen_implementations = (
        _chosen("attention", implementations, ["auto", *ATTENTION_IMPLEMENTATIONS])
        if implementations
        else []
    )
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": NO_GPU}) if as_json else NO_GPU)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    sheet = data_sheet_flops(torch.cuda.get_device_name(device)) if precision == "bf16" else None
    settings = Settings(
        device=device,
        precision=precision,
        rounds=rounds,
        compile=compiled,
        data_sheet_flops=sheet,
    )
    run(
        {name: MODELS[name] for name in chosen_models},
        chosen_implementations,
        settings,
        profile=profile,
        out=out,
        as_json=as_json,
    )


def run(
    models: "dict[str, BenchModel]",
    implementations: list[str],
    settings: "Settings",
    *,
    profile: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure on `settings.device`, print every row when it is known, and write `out`."""
    from txl_dist.bench.gpu import bench_gpu, measured_peak
    from txl_dist.bench.gpu_table import HEADER, device_name, machine_line, markdown, table_row

    peak_flops = measured_peak(settings)
    machine = machine_line(
        settings.device, peak_flops=peak_flops, sheet_flops=settings.data_sheet_flops
    )
    if not as_json:
        print(f"{machine}\n\n{HEADER}", flush=True)
    rows: list[GpuRow] = []
    for row in bench_gpu(models, implementations, settings, peak_flops=peak_flops):
        rows.append(row)
        if not as_json:
            print(table_row(row), flush=True)
        if row.note:
            print(f"{row.model}, {row.attention}: {row.note}", file=sys.stderr)
    table = _profile(rows[0], models[rows[0].model], settings) if profile else None
    if out is not None:
        title = f"{datetime.now(UTC):%Y-%m-%d}: training steps on {device_name(settings.device)}"
        out.write_text(markdown(title, machine, rows, table))
    if as_json:
        result = {
            "device": device_name(settings.device),
            "precision": settings.precision,
            "compile": settings.compile,
            "peak_flops_measured": peak_flops,
            "peak_flops_data_sheet": settings.data_sheet_flops,
            "rows": [asdict(row) for row in rows],
            "profile": table,
        }
        print(json.dumps(result, allow_nan=False))
    elif table:
        print(f"\n{table}")


def _profile(row: "GpuRow", model: "BenchModel", settings: "Settings") -> str:
    """A profile of the row's model with `auto`, or why there is none."""
    from txl_dist.bench.gpu import profile_step

    try:
        table = profile_step(replace(model, num_lanes=row.num_lanes), "auto", settings)
    except Exception as error:  # the rows are measured: they must not be lost
        table = f"no profile: {type(error).__name__}: {error}"
    return f"{row.model}, auto\n{table}"


def _chosen(option: str, given: str | None, known: list[str]) -> list[str]:
    names = [name.strip() for name in given.split(",")] if given else known
    for name in names:
        if name not in known:
            raise ConfigError(f"--{option}: {name!r} must be one of {', '.join(known)}")
    return names
