"""The rows of `txl bench gpu` as a Markdown table for docs/experiments.md."""

import platform
from collections.abc import Sequence

import torch

from txl_dist.bench.gpu import GpuRow

HEADER = (
    "| model | attention | lanes x tokens | ms per step | tokens/s | MFU, data sheet | goal "
    "| MFU, measured peak | peak GiB |\n|---|---|---|---|---|---|---|---|---|"
)


def machine_line(device: torch.device, *, peak_flops: float, sheet_flops: float | None) -> str:
    """The device and the library versions, in one line."""
    sheet = "unknown" if sheet_flops is None else f"{sheet_flops / 1e12:.0f}"
    return (
        f"{device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python "
        f"{platform.python_version()}; peak {peak_flops / 1e12:.3g} TFLOP/s measured, {sheet} in "
        "the data sheet (bf16)"
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()


def table_row(row: GpuRow) -> str:
    attention = row.attention if row.attention == row.kernel else f"{row.attention} ({row.kernel})"
    cells = [
        row.model,
        attention,
        f"{row.num_lanes} x {row.tgt_len}",
        _number(row.step_ms, ".1f"),
        _number(row.tokens_per_second, ",.0f"),
        _number(row.mfu_data_sheet, ".3f"),
        _number(row.mfu_goal, ".2f"),
        _number(row.mfu_measured, ".3f"),
        _number(row.peak_gib, ".1f"),
    ]
    return f"| {' | '.join(cells)} |"


def markdown(title: str, machine: str, rows: Sequence[GpuRow], profile: str | None) -> str:
    """A section for docs/experiments.md."""
    notes = [f"- {row.model}, {row.attention}: {row.note}" for row in rows if row.note]
    lines = [f"## {title}", "", machine, "", HEADER]
    lines += [table_row(row) for row in rows]
    lines += ["", *notes] if notes else []
    lines += ["", "```text", profile.rstrip(), "```"] if profile else []
    return "\n".join(lines) + "\n"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
