"""The picture of the README: what the memory is worth, drawn from docs/experiments/memory.md.

    python benchmarks/memory_picture.py        # writes docs/figures/memory.svg

Left: nats per byte of held-out source code at two budgets, of a model with memory, of its twin on
the same lanes and of a model on random windows, each read as it was trained (`compare_blocks.py
--readings`). Right: the loss by position in the segment (`memory_study.py`). The figures are those
of the document, so that the picture cannot differ from what was measured.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "docs" / "experiments" / "memory.md"
PICTURE = ROOT / "docs" / "figures" / "memory.svg"
WIDTH, HEIGHT = 760, 300
STYLE = """
    text { fill: #1d2330; font: 13px system-ui, sans-serif; }
    .title, .value { font-weight: 600; } .note { fill: #4a5263; font-size: 11px; }
    .grid { stroke: #8a92a155; } polyline { fill: none; stroke-width: 2.5; }
    .with { fill: #3f51b5; } .line.with { stroke: #3f51b5; fill: none; }
    .without { fill: #c77700; } .line.without { stroke: #c77700; fill: none; }
    .never { fill: #7a8292; } .line.never { stroke: #7a8292; fill: none; stroke-dasharray: 5 4; }
    @media (prefers-color-scheme: dark) {
      text { fill: #eceff7; } .note { fill: #b4bccd; } .grid { stroke: #8a92a155; }
      .with { fill: #8c9eff; } .line.with { stroke: #8c9eff; }
      .without { fill: #ffb74d; } .line.without { stroke: #ffb74d; }
      .never { fill: #a3abba; } .line.never { stroke: #a3abba; }
    }
"""


def main() -> None:
    """Write the picture."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PICTURE.write_text(picture(EXPERIMENTS.read_text("utf-8")), "utf-8")
    print(f"wrote {PICTURE}")


def picture(experiments: str) -> str:
    """The SVG, from docs/experiments/memory.md. Raises ValueError if a figure is missing."""
    rows = re.findall(r"^\| stdlib, 1 \| .*$", experiments, re.MULTILINE)
    columns = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    later = re.search(
        r"memory ([\d.]+) read as trained; its twin ([\d.]+) .*?; random windows of 64, 128 and "
        r"256 bytes [\d.]+, [\d.]+ and ([\d.]+)",
        experiments,
    )
    if len(rows) != 3 or not later:
        raise ValueError(f"{EXPERIMENTS} has no scores of memory, twin and pieces at two budgets")
    # A model without memory is read in segments of 64 given 0, the one with 128 given 128.
    first = [float(columns[0][6]), float(columns[1][3]), float(columns[2][3])]
    budgets = {"2 minutes": first, "13 minutes": [float(value) for value in later.groups()]}
    section = experiments.partition("Context fragmentation: mean nats by position")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()[:9]
        if line.startswith("|") and not line.startswith("|-")
    ]
    curves = {name: [float(value) for value in values] for name, *values in rows[1:]}
    elements = [*_bars(budgets), *_curves(rows[0][1:], curves)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
            ' aria-label="Nats per byte and loss by position, with memory and without">',
            f"  <style>{STYLE}  </style>",
            *(f"  {element}" for element in elements),
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def _bars(budgets: dict[str, list[float]]) -> Iterator[str]:
    bottom, scale = 235, 130  # pixels per nat
    yield _text(20, 24, "Nats per byte, held-out source code", "title")
    for start, (budget, values) in zip((24, 174), budgets.items(), strict=True):
        kinds = (("with", "memory"), ("never", "twin"), ("without", "windows"))
        for place, ((kind, label), value) in enumerate(zip(kinds, values, strict=True)):
            x, height = start + 44 * place, value * scale
            top = bottom - height
            yield f'<rect class="{kind}" x="{x}" y="{top:g}" width="38" height="{height:g}"/>'
            yield _text(x + 19, top - 6, f"{value:.3f}", "value", "middle")
            yield _text(x + 19, bottom + 15, label, "note", "middle")
        yield _text(start + 63, bottom + 34, f"after {budget}", "note", "middle")
    yield f'<path class="grid" d="M20 {bottom}h290"/>'
    yield _text(20, 290, "one core, one seed; windows of 64, of 256 bytes", "note")


def _curves(positions: Sequence[str], curves: dict[str, list[float]]) -> Iterator[str]:
    left, right, bottom, top, low, high = 375, 590, 250, 50, 1.0, 3.5

    def x_of(index: int) -> float:
        return left + index * (right - left) / (len(positions) - 1)

    def y_of(nats: float) -> float:
        return bottom - (nats - low) * (bottom - top) / (high - low)

    yield _text(340, 24, "Loss by position of the token in its segment, nats", "title")
    for nats in (1, 2, 3):
        yield f'<path class="grid" d="M{left} {y_of(nats):g}H{right}"/>'
        yield _text(left - 8, y_of(nats) + 4, str(nats), "note", "end")
    for index, position in enumerate(positions):
        yield _text(x_of(index), bottom + 18, position, "note", "middle")
    for name, kind, label, shift in (
        ("the same, mem_len 0", "without", "the same, memory 0", -9),
        ("without memory", "never", "trained without", 26),
        ("with memory", "with", "with memory", 9),
    ):
        points = " ".join(f"{x_of(i):g},{y_of(nats):.1f}" for i, nats in enumerate(curves[name]))
        yield f'<polyline class="line {kind}" points="{points}"/>'
        y = y_of(curves[name][-1]) + shift
        yield _text(right + 10, y, label, f"value {kind}")
    yield _text(375, 290, "benchmarks/memory_study.py: 0.9 M parameters, segments of 64", "note")


if __name__ == "__main__":
    main()
