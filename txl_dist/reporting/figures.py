"""Figures for reports. No other module imports matplotlib.

The same figure always gives the same bytes. Colours are those of viridis, which has monotonic
lightness: it is readable in greyscale and with colour vision deficiency.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = [
    "Axes",
    "Figure",
    "line_colours",
    "new_figure",
    "plain_label",
    "svg_bytes",
    "write_figure",
    "write_png",
]


def new_figure(size_inches: tuple[float, float], *, title: str = "") -> Figure:
    """An empty figure. `title` is plain text: `$` and `_` have no special meaning."""
    # Figure instead of pyplot, which keeps global state.
    figure = Figure(figsize=size_inches, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def line_colours(num_lines: int) -> np.ndarray:
    """One colour per line, [lines, 4]."""
    # Up to 0.9 of the colour map: its end is a yellow that is hard to see on white.
    colours: np.ndarray = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, num_lines))
    return colours


def plain_label(text: str) -> str:
    """`text` for a legend, where `$` would start a formula and a leading `_` hides the line."""
    return " " * text.startswith("_") + text.replace("$", r"\$")


def write_figure(figure: Figure, directory: Path, name: str) -> None:
    """Write NAME.png and NAME.svg."""
    write_png(figure, directory / f"{name}.png")
    (directory / f"{name}.svg").write_bytes(svg_bytes(figure))


def write_png(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    with _reproducible():
        figure.savefig(path, dpi=150, metadata={"Software": None})


def svg_bytes(figure: Figure) -> bytes:
    """The figure as SVG, to be embedded in a page."""
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
