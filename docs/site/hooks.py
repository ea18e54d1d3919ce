"""MkDocs hooks: what the site has besides the files of docs/.

    docs/*.md ---- links to other files of the repository -> pages below source/ (sources.py)
              ---- "<!-- generated: NAME -->" -> reference from the code (references.py)
              ---- "<!-- api -->" -> mkdocstrings' blocks of the public API
              ---- notebooks/*.ipynb -> pages
              ---- every page -> the same page as .md in the site, and llms.txt, for programs

The pages stay readable where no site is built: links are relative to the file, and generated parts
are in the repository.
"""

import json
import logging
from pathlib import Path
from typing import Any

from api_reference import api_reference, as_text
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from references import filled
from sources import ROOT, linked_files, page_of, source_page, with_site_links

API = "<!-- api -->"
DATED = ("decisions/0", "experiments")
_pages: dict[str, tuple[Page, str]] = {}
"""Every page by its path in docs/, with its Markdown as it is in the site."""
_in_navigation: list[Page] = []


def on_config(config: Any) -> None:
    _pages.clear()
    _in_navigation.clear()
    for name in ("mkdocs.plugins", "griffe"):  # links in docstrings are of no page
        logging.getLogger(name).setLevel(logging.WARNING)


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook, and for each file outside docs/ that a page links to."""
    docs = Path(config.docs_dir)
    for path in docs.glob("notebooks/*.ipynb"):
        page = path.relative_to(docs).with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=_notebook_page(path)))
    for path in linked_files(docs):
        files.append(
            File.generated(
                config,
                page_of(path),
                content=source_page(path),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
        )
    return files


def on_nav(nav: Navigation, config: Any, files: Files) -> None:
    _in_navigation.extend(nav.pages)


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Fill in what is generated, and let links lead to pages of the site."""
    markdown = filled(markdown).replace(API, api_reference())
    source = page.file.src_uri
    if source.startswith(DATED):
        page.meta["search"] = {"boost": 0.3}  # after the pages about what is
    markdown = with_site_links(markdown, source)
    _pages[source] = (page, markdown)
    return markdown


def on_post_build(config: Any) -> None:
    """Write the Markdown of every page next to its .html file, and llms.txt.

    Also under the name of its source, to which links in other pages lead: README.md is index.html.
    """
    site = Path(config.site_dir)
    for page, markdown in _pages.values():
        text = as_text(markdown)
        for path in {(site / page.file.dest_uri).with_suffix(".md"), site / page.file.src_uri}:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    index = _index(_in_navigation, (ROOT / "docs" / "index.md").read_text("utf-8"))
    (site / "llms.txt").write_text(index, "utf-8")


def _index(pages: list[Any], first_page: str) -> str:
    """What the project is, and one line per page, in the order of the navigation."""
    title, _, rest = first_page.partition("\n\n")
    summary = " ".join(rest.partition("\n\n")[0].split())
    lines = [title, "", f"> {summary}"]
    section = None
    for page in pages:
        above = page.ancestors[-1].title if page.ancestors else "Begin"
        if above != section:
            lines += ["", f"## {above}", ""]
            section = above
        address = Path(page.file.dest_uri).with_suffix(".md").as_posix()
        lines.append(f"- [{page.title}]({address})")
    return "\n".join(lines) + "\n"


def _notebook_page(path: Path) -> str:
    """Markdown of a notebook, with a link to the file below its title."""
    cells = [_cell(cell) for cell in json.loads(path.read_text("utf-8"))["cells"]]
    title, _, rest = cells[0].partition("\n\n")
    link = f"Download [{path.name}]({path.name}) to run it: `jupyter lab {path.name}`."
    return "\n\n".join([title, link, rest, *cells[1:]]) + "\n"


def _cell(cell: dict[str, str | list[str]]) -> str:
    source = "".join(cell["source"])  # a text, or a list of its lines
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
