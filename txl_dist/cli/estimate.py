"""`txl estimate`: memory, FLOPs and time of a run on any number of GPUs, before it starts."""

import json
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from txl_dist.cli.options import AsJson, ConfigPath, Overrides


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
