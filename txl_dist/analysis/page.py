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
h1 { font-size: 1.6rem; margin: .5rem 0 } h1 small { color: var(--soft); font-weight: normal }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--line) }
p { margin: .5rem 0; max-width: 46rem } .soft { color: var(--soft); font-size: .9rem }
.note { color: var(--note) }
.box { overflow-x: auto; margin: .5rem 0; background:  /* a shadow where the box scrolls further */
  linear-gradient(to right, var(--page) 40%, transparent) left / 2rem 100% no-repeat local,
  linear-gradient(to left, var(--page) 40%, transparent) right / 2rem 100% no-repeat local,
  linear-gradient(to right, var(--line), transparent) left / .7rem 100% no-repeat scroll,
  linear-gradient(to left, var(--line), transparent) right / .7rem 100% no-repeat scroll }
.box:focus-visible, summary:focus-visible { outline: 2px solid currentColor; outline-offset: 2px }
table { border-collapse: collapse; font-size: .95rem; overflow-wrap: normal }
td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line) }
@media (min-width: 40rem) { tbody td:first-child { white-space: nowrap } }
thead th { border-bottom: 2px solid var(--line); white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.facts th { font-weight: normal; color: var(--soft); min-width: 7rem }
.facts tbody td { overflow-wrap: anywhere; white-space: normal }
pre { overflow: auto; max-height: 32rem; background: var(--box); padding: .7rem; margin: .5rem 0;
  font-size: .8rem; line-height: 1.4; border-radius: 4px }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere }
.charts { display: grid; gap: 1.2rem 1.5rem; margin: .5rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
figure { margin: 0; max-width: 34rem } figure img { width: 100%; height: auto; display: block }
figcaption { font-weight: 600; font-size: .95rem }
summary { cursor: pointer }
"""


def html_page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of the page itself: browsers would ask a server for one.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)} <small>{escape(subtitle)}</small></h1>\n{''.join(sections)}"
        "</body></html>\n"
    )


def section(title: str, *content: str) -> str:
    """A part of the page; nothing without content."""
    text = "\n".join(part for part in content if part)
    return f"<h2>{escape(title)}</h2>\n{text}\n" if text else ""


def paragraph(text: str, kind: str = "") -> str:
    """`kind`: `soft` for explanations, `note` for what is wrong."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, whose text may be long; rows without a value are left out."""
    lines = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows
        if value
    ]
    return _box(f'<table class="facts">{"".join(lines)}</table>') if lines else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns of numbers, which begin with a digit or a sign, are aligned right."""
    body = [list(row) for row in rows]
    if not body:
        return ""
    is_number = [all(_is_number(row[column]) for row in body) for column in range(len(header))]
    kinds = [' class="number"' if number else "" for number in is_number]
    head = "".join(
        f'<th scope="col"{kind}>{escape(cell)}</th>'
        for cell, kind in zip(header, kinds, strict=True)
    )
    lines = [
        "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        for row in body
    ]
    content = "".join(f"<tr>{line}</tr>" for line in lines)
    return _box(f"<table><thead><tr>{head}</tr></thead><tbody>{content}</tbody></table>")


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


def _box(content: str) -> str:
    # With tabindex, keys can scroll it.
    return f'<div class="box" tabindex="0">{content}</div>'


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.lstrip("+-≥ ")[:1].isdigit()
