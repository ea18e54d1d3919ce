"""All figures: how lines are drawn, and those of attention and of context curves.

No other module imports matplotlib; `run_report.py` has the curves of `txl report`. The same figure
always gives the same bytes. Text from elsewhere is plain: `$` and `_` have no special meaning.

Lines are told apart with any colour vision and in greyscale: they also differ in dashes. A few
lines have the colours of PALETTE, of Okabe and Ito and of Tol, as far as they have a contrast of 3
to white; more lines have those of viridis, whose lightness is monotonic.
"""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:  # it imports torch, which the report of a run does not need
    from txl_dist.analysis.attention import AttentionByDistance

MAX_LINES_IN_LEGEND = 20
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#332288", "#882255")
DASHES = ("-", "--", "-.", ":")
MAX_MARKERS = 30
"""A line of more points has no markers."""
MIN_DRAWN = 1e-4
"""Logarithmic axes of shares and gains start here; smaller values are drawn at this one."""


def new_figure(size_inches: tuple[float, float], *, title: str = "") -> Figure:
    # Figure instead of pyplot, which keeps global state.
    figure = Figure(figsize=size_inches, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def draw_lines(axes: Axes, lines: Sequence[tuple[str, Any, Any]]) -> None:
    """Draw lines: label, x and y of each."""
    # Up to 0.9 of the colour map: its end is a yellow that is hard to see on white.
    spread = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(lines)))
    colours = PALETTE if len(lines) <= len(PALETTE) else spread
    for number, (label, x, y) in enumerate(lines):
        # In a legend, `$` would start a formula, and a leading `_` hides the line.
        plain = " " * label.startswith("_") + label.replace("$", r"\$")
        dashes = DASHES[number % len(DASHES)]
        # A line of one point is not seen, and few points should be.
        marker = "." if len(x) <= MAX_MARKERS else ""
        style: dict[str, Any] = {"color": colours[number], "marker": marker, "linewidth": 1.2}
        axes.plot(x, y, dashes, label=plain, **style)


class _PlainNumbers(LogFormatter):
    """Labels the ticks that matplotlib would label, with 0.6 where it writes 6 x 10^-1."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,g}" if super().__call__(x, pos) else ""


def finish(axes: Axes, x_label: str, y_label: str) -> None:
    """Add labels, a grid, and a legend unless there is one line, or many."""
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(_PlainNumbers())
        axes.yaxis.set_minor_formatter(_PlainNumbers())
    axes.set_xlabel(x_label, fontsize=9, parse_math=False)
    axes.set_ylabel(y_label, fontsize=9, parse_math=False)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, linewidth=0.3, color="0.8")
    if 1 < len(axes.get_legend_handles_labels()[1]) <= MAX_LINES_IN_LEGEND:
        axes.legend(fontsize=8)


def write_figure(figure: Figure, directory: Path, name: str) -> list[str]:
    """Write NAME.png and NAME.svg; returns both names. The same figure gives the same bytes."""
    with _reproducible():
        figure.savefig(directory / f"{name}.png", dpi=150, metadata={"Software": None})
    (directory / f"{name}.svg").write_bytes(svg_bytes(figure))
    return [f"{name}.png", f"{name}.svg"]


def svg_bytes(figure: Figure) -> bytes:
    file = io.BytesIO()
    with _reproducible():
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


@contextmanager
def _reproducible() -> Iterator[None]:
    # Without a salt the ids in the SVG are random. Version and date are left out of the metadata.
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "txl"}):
        # A character of the title that is missing in the font is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


# --- attention by distance ------------------------------------------------------------------------


def power_bins(num_distances: int) -> list[int]:
    """Edges of the bins: their starts 0, 1, 2, 4, ..., then the end of the last one."""
    starts = [0, *(2**power for power in range((num_distances - 1).bit_length()))]
    return [*starts, num_distances]


def sum_over_bins(mass: ArrayLike, edges: Sequence[int]) -> NDArray[Any]:
    """Sums over [edges[k], edges[k + 1]) of the last dimension; the last edge is its length."""
    return np.add.reduceat(np.asarray(mass), edges[:-1], axis=-1)


def plot_attention(attention: "AttentionByDistance", *, title: str) -> Figure:
    """Draw all layers, one panel each, with equal axes."""
    num_layers = len(attention.heads.by_distance_LHD)
    columns = min(num_layers, 3)
    rows = -(-num_layers // columns)
    figure = new_figure((4.2 * columns, 3.2 * rows + 0.7), title=title)
    for layer in range(num_layers):
        _draw_layer(figure.add_subplot(rows, columns, layer + 1), attention, layer)
    return figure


def _draw_layer(axes: Axes, attention: "AttentionByDistance", layer: int) -> None:
    heads, even = attention.heads, attention.even
    edges = power_bins(heads.by_distance_LHD.shape[-1])
    # X: bins
    mass_HX = np.maximum(sum_over_bins(heads.by_distance_LHD[layer], edges), MIN_DRAWN)
    even_X = np.maximum(sum_over_bins(even.by_distance_LHD[0, 0], edges), MIN_DRAWN)
    mean_H = heads.mean_distance[layer].tolist()
    bin_X = np.arange(len(edges) - 1)
    axes.plot(bin_X, even_X, color="black", linestyle=":", linewidth=1.2, label="even")
    nearest_first = sorted(range(len(mean_H)), key=mean_H.__getitem__)
    draw_lines(
        axes, [(f"head {h}: mean {mean_H[h]:,.0f}", bin_X, mass_HX[h]) for h in nearest_first]
    )
    if edges[-1] > attention.tgt_len:
        # From distance tgt_len on, all keys are in memory. Bin k starts at 2**(k - 1), drawn at k.
        border = np.log2(attention.tgt_len) + 0.5
        axes.axvline(border, color="0.35", linestyle="--", linewidth=0.9, label="memory only")
    axes.set_yscale("log")
    axes.set_ylim(MIN_DRAWN, 1.3)
    axes.set_xticks(bin_X, [f"{start:,}" for start in edges[:-1]], rotation=45)
    axes.set_title(
        f"layer {layer}: {heads.memory_LH[layer].mean():.0%} on memory "
        f"(even: {even.memory_LH[0, 0]:.0%})",
        fontsize=9,
    )
    finish(axes, "distance from query to key: start of each bin", "share of a head's attention")


# --- context curves -------------------------------------------------------------------------------


def plot_group(report: Mapping[str, Any]) -> Figure:
    """Draw recl.json: mean losses by context with intervals, and gains by context."""
    title = f"{report['group']} on {report['split']}: {report['positions']:,} targets"
    figure = new_figure((12, 4.6), title=title)
    losses, gains = figure.subplots(1, 2)
    models, contexts = report["models"], report["contexts"]
    draw_lines(
        losses, [(m["name"], contexts, [point["nats"] for point in m["curve"]]) for m in models]
    )
    for model, line in zip(models, losses.get_lines(), strict=True):
        low, high = ([point[end] for point in model["curve"]] for end in ("low", "high"))
        losses.fill_between(contexts, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    finish(losses, "context c in tokens", "nats per token after exactly c tokens")

    r = min(result["r"] for result in models[0]["recl"])  # which has the hardest targets
    lines = []
    for model in models:
        (result,) = (result for result in model["recl"] if result["r"] == r)
        label = f"{model['name']}: RECL {'≥ ' * result['is_lower_bound']}{result['recl']:,}"
        lines.append((label, contexts[:-1], np.maximum(result["gains"], MIN_DRAWN)))
    draw_lines(gains, lines)
    gains.axhline(report["threshold"], color="0.35", linestyle="--", label="threshold")
    gains.set_yscale("log")
    finish(
        gains, "context c in tokens", f"relative gain of {report['delta']} more tokens, r = {r:g}"
    )
    return figure
