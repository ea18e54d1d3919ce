"""The parts of an HTML page that needs no other file: style, sections, tables, charts.

Light and dark follow the settings of the browser. Tables and long lines scroll in their boxes, so
that a screen of 360 pixels shows the page without scrolling sideways. All text is escaped: that of
a run may contain anything. There are no scripts.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape

from txl_dist.analysis.run_charts import Chart

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --page: #fff; --soft: #595959; --line: #d0d0d0;
  --box: #f5f5f5; --note: #8a4b00 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --page: #161616; --soft: #a8a8a8; --line: #444; --box: #222;
    --note: #ffb861 }
  figure img { filter: invert(1) hue-rotate(180deg) }
}
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 76rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; border-bottom: 1px solid var(--line) }
.soft { color: var(--soft); font-size: .9rem } .note { color: var(--note) }
.box { overflow-x: auto }
table { border-collapse: collapse; font-size: .95rem }
td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line) }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
pre { overflow: auto; max-height: 32rem; background: var(--box); padding: .7rem; font-size: .8rem }
pre.text { white-space: pre-wrap }
.charts { display: grid; gap: 1.2rem 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
figure { margin: 0; max-width: 34rem } figure img { width: 100%; height: auto; display: block }
"""


def html_page(title: str, sections: Iterable[str]) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of the page itself: browsers would ask a server for one.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{''.join(sections)}</body></html>\n"
    )


def section(title: str, *content: str) -> str:
    """A part of the page; nothing without content."""
    text = "\n".join(part for part in content if part)
    return f"<h2>{escape(title)}</h2>\n{text}\n" if text else ""


def paragraph(text: str, kind: str = "") -> str:
    """`kind`: `soft` for explanations, `note` for what is wrong."""
    return f'<p class="{kind}">{escape(text)}</p>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns of numbers, which begin with a digit or a sign, are aligned right."""
    body = [list(row) for row in rows]
    if not body:
        return ""
    is_number = [
        all(row[column].lstrip("+- ")[:1].isdigit() or row[column] in ("", "-") for row in body)
        for column in range(len(header))
    ]
    kinds = [' class="number"' if number else "" for number in is_number]

    def line(tag: str, cells: Sequence[str]) -> str:
        parts = (f"<{tag}{kind}>{escape(c)}</{tag}>" for c, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    content = "".join(line("td", row) for row in body)
    head = line("th", header)
    # With tabindex, keys can scroll it.
    return f'<div class="box" tabindex="0"><table>{head}{content}</table></div>'


def charts(drawn: Iterable[Chart]) -> str:
    """Charts in a grid of as many columns as fit."""
    figures = [
        f"<figure><figcaption>{escape(chart.title)}</figcaption>"
        f'<img alt="{escape(f"{chart.title}. {chart.description}")}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(chart.svg).decode()}"></figure>'
        for chart in drawn
    ]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def preformatted(text: str, kind: str = "") -> str:
    """`kind`: `text` breaks long lines."""
    return f'<pre tabindex="0" class="{kind}">{escape(text)}</pre>' if text else ""


def details(summary: str, content: str) -> str:
    """Content that opens with a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>" if content else ""
