"""Prints a RunEstimate: tables with one column per number of GPUs."""

from collections.abc import Callable, Iterator

from txl_dist.estimate.assumptions import Assumptions
from txl_dist.estimate.limits import even_world_sizes
from txl_dist.estimate.run_estimate import RunEstimate, ScaleEstimate, StageEstimate

LABEL_WIDTH, COLUMN_WIDTH = 50, 13


def lines_of(estimate: RunEstimate, assumptions: Assumptions, *, precision: str) -> Iterator[str]:
    """The lines that `txl estimate` prints."""
    yield (
        f"{estimate.num_parameters:,} parameters, {estimate.flops_per_token:.3g} FLOPs per token "
        f"(forward and backward), ZeRO stage {estimate.zero_stage}"
    )
    yield from _world_sizes(estimate, assumptions)
    yield ""
    yield _row("GPUs", [f"{scale.gpus:,}" for scale in estimate.scales])
    for label, cell in _SCALE_ROWS:
        yield _row(label, [cell(scale) for scale in estimate.scales])
    stages = sorted({stage for scale in estimate.scales for stage in scale.stages})
    for title, cell_of_stage in _STAGE_TABLES:
        yield ""
        yield title
        for stage in stages:
            mark = " (the run's)" if stage == estimate.zero_stage else ""
            cells = [cell_of_stage(scale.stages[stage]) for scale in estimate.scales]
            yield _row(f"  ZeRO stage {stage}{mark}", cells)
    yield ""
    yield f"parts of a rank's peak memory at stage {estimate.zero_stage}"
    for part in ("weights", "gradients", "optimizer", "buffers", "lanes", "activations", "host"):
        uses = (scale.stages[estimate.zero_stage].memory for scale in estimate.scales)
        yield _row(f"  {part}", [_size(getattr(use, part)) for use in uses])
    yield ""
    yield "limits of the design"
    ranks = [scale.gpus for scale in estimate.scales]
    for limit in estimate.limits:
        values = [_number(limit.value(num_ranks)) for num_ranks in ranks]
        yield _row(f"  {limit.name}, {limit.unit}", values)
        if limit.first_ranks is not None:
            yield f"    above {_number(limit.threshold)} from {limit.first_ranks:,} ranks on:"
            yield f"    {limit.advice}"
    yield ""
    yield from _assumed(assumptions, precision)


def _world_sizes(estimate: RunEstimate, assumptions: Assumptions) -> Iterator[str]:
    lanes = estimate.max_ranks
    if lanes is None:
        yield f"valid world sizes: any; {assumptions.lanes_per_gpu} lanes per GPU"
        return
    even = even_world_sizes(lanes)
    shown = ", ".join(map(str, even if len(even) <= 16 else [*even[:12], "...", *even[-3:]]))
    yield f"valid world sizes: 1 to {lanes:,} (data.num_lanes); without padding: {shown}"


def _assumed(assumptions: Assumptions, precision: str) -> Iterator[str]:
    links, storage = assumptions.links, assumptions.storage_gbytes_per_second
    yield "assumed"
    yield (
        f"  GPUs: {assumptions.peak_flops(precision) / 1e12:g} TFLOP/s each, at "
        f"{assumptions.utilisation:.0%} utilisation; {assumptions.kernel_seconds * 1e6:g} us to "
        "start an operation"
    )
    yield (
        f"  links: {links.intra_node_gbit:g} Gbit/s per GPU within a node of "
        f"{links.gpus_per_node}; {links.node_gbit:g} Gbit/s and {links.latency_seconds * 1e6:g} us "
        "between nodes"
    )
    yield (
        f"  storage {storage:g} GB/s; {assumptions.node_mtbf_hours:g} h between failures of a "
        f"node; {assumptions.restart_seconds:g} s per restart"
    )
    if assumptions.device == "cuda":
        yield (
            "  memory is that of tensors: allow 1 to 2 GiB more per GPU for the CUDA context, NCCL "
            "and fragmentation"
        )


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def _size(num_bytes: float) -> str:
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**exponent:
            return f"{num_bytes / 1024**exponent:,.2f} {unit}"
    return f"{num_bytes:.0f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    for limit, unit, factor in ((1, "ms", 1e3), (120, "s", 1), (7200, "min", 1 / 60)):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h" if seconds < 172800 else f"{seconds / 86400:.3g} d"


def _time_of_run(days: float | None) -> str:
    return "unknown" if days is None else _duration(86400 * days)


def _step_share(stage: StageEstimate) -> str:
    return f"{_duration(stage.step.total)} {stage.step.exposed / stage.step.total:.0%}"


_SCALE_ROWS: list[tuple[str, Callable[[ScaleEstimate], str]]] = [
    ("lanes per rank", lambda scale: str(scale.lanes_per_rank)),
    ("micro-batches per step", lambda scale: str(scale.micro_batches)),
    ("rows that are padding", lambda scale: f"{scale.padded_share:.1%}"),
    ("tokens per second, all ranks", lambda scale: _number(scale.tokens_per_second)),
    ("time of the run, without failures", lambda scale: _time_of_run(scale.days)),
    ("  with failures", lambda scale: _time_of_run(scale.days_with_failures)),
    (
        "compressed data read per rank, kB/s",
        lambda scale: (
            "unknown"
            if scale.data_bytes_per_second is None
            else _number(scale.data_bytes_per_second / 1e3)
        ),
    ),
    ("checkpoint", lambda scale: _size(scale.saving.size.num_bytes)),
    ("  per rank, also on its host", lambda scale: _size(scale.saving.size.bytes_per_rank)),
    ("  files", lambda scale: f"{scale.saving.size.num_files:,}"),
    ("  training stops for", lambda scale: _duration(scale.saving.save_seconds)),
    ("  written after", lambda scale: _duration(scale.saving.write_seconds)),
    ("  interval of the config", lambda scale: _duration(scale.saving.interval_seconds)),
    ("  best interval, steps", lambda scale: f"{scale.saving.best_interval_steps:,}"),
    ("mean time between failures", lambda scale: _duration(scale.saving.mtbf_seconds)),
    ("goodput with the config's interval", lambda scale: f"{scale.saving.goodput:.2%}"),
    ("  with the best interval", lambda scale: f"{scale.saving.best_goodput:.2%}"),
]

_STAGE_TABLES: list[tuple[str, Callable[[StageEstimate], str]]] = [
    ("peak memory of a rank's device", lambda stage: _size(stage.memory.device)),
    ("sent by a rank per step", lambda stage: _size(stage.bytes_sent)),
    ("time of a step, and share spent waiting for communication", _step_share),
]
