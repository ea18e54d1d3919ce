"""`txl estimate`: memory, time and limits of a run on any number of GPUs, before it starts."""

import json
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
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    peak_tflops: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Peak of one GPU.", show_default="A100: 312 bf16, 19.5 fp32"),
    ] = None,
    utilisation: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Fraction of the peak, while computing.")
    ] = 0.3,
    link_gbit: Annotated[
        float, typer.Option(min=1e-6, help="Gbit/s between a node and the others.")
    ] = 200.0,
    intra_node_gbit: Annotated[
        float, typer.Option(min=1e-6, help="Gbit/s of a GPU within its node.")
    ] = 2400.0,
    link_latency_us: Annotated[
        float, typer.Option(min=0, help="Latency of a message between nodes in us.")
    ] = 20.0,
    storage_gbytes: Annotated[
        float, typer.Option(min=1e-6, help="GB/s at which all ranks together write checkpoints.")
    ] = 2.0,
    mtbf_hours: Annotated[
        float, typer.Option(min=1e-3, help="Mean time between failures of one node.")
    ] = 6000.0,
    restart_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds from a failure to the next step.")
    ] = 120.0,
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
    """Estimate memory per rank and ZeRO stage, time of a step and of the run, and checkpoints.

    Reads the manifest of the dataset if it is there; else set model.vocab_size.

    Example: txl estimate configs/paper/wt103-base.yaml model.vocab_size=267735 --gpus 4,60
    """
    numbers = _parse_gpus(gpus)
    from txl_dist.config.config_file import load_run_config
    from txl_dist.estimate.assumptions import Assumptions
    from txl_dist.estimate.communication import Links
    from txl_dist.estimate.data_facts import DataFacts
    from txl_dist.estimate.report import lines_of
    from txl_dist.estimate.run_estimate import estimate_run, scale_to_json

    run = load_run_config(config, overrides or ())
    assumptions = Assumptions(
        device=device,
        peak_tflops=peak_tflops,
        utilisation=utilisation,
        links=Links(
            gpus_per_node=gpus_per_node,
            node_gbit=link_gbit,
            intra_node_gbit=intra_node_gbit,
            latency_seconds=link_latency_us / 1e6,
        ),
        storage_gbytes_per_second=storage_gbytes,
        node_mtbf_hours=mtbf_hours,
        restart_seconds=restart_seconds,
        lanes_per_gpu=lanes_per_gpu,
    )
    result = estimate_run(run, DataFacts.of(run), gpus=numbers, assumptions=assumptions)
    if not as_json:
        print("\n".join(lines_of(result, assumptions, precision=run.precision)))
        return
    limits = {limit.name: limit.to_json(numbers) for limit in result.limits}
    content = {
        "num_parameters": result.num_parameters,
        "flops_per_token": result.flops_per_token,
        "zero_stage": result.zero_stage,
        "legal_world_sizes": {"minimum": 1, "maximum": result.max_ranks},
        "scales": [scale_to_json(scale) for scale in result.scales],
        "limits": limits,
        "assumptions": assumptions.to_json(run.precision),
    }
    print(json.dumps(content))


def _parse_gpus(text: str) -> list[int]:
    from txl_dist.errors import ConfigError

    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--gpus {text}: expected numbers from 1 on, separated by commas; write for example "
            "--gpus 8,64,512,4096"
        )
    return sorted({int(part) for part in parts})
