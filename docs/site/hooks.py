"""MkDocs hooks: what the site has besides the files of docs/.

    docs/*.md ---- links to other files of the repository -> pages below source/ (sources.py)
              ---- "<!-- generated: NAME -->" -> reference from the code (references.py)
              ---- "<!-- api -->" -> mkdocstrings' blocks of the public API
              ---- notebooks/*.ipynb -> pages (notebook_pages.py)
              ---- every page -> the same page as .md in the site, and llms.txt (plain_text.py)

The pages stay readable where no site is built: links are relative to the file, and generated parts
are in the repository.
"""

import logging
from pathlib import Path
from typing import Any

from api_reference import api_reference, as_text
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from notebook_pages import notebook_page
from plain_text import write_index, write_page
from references import filled
from sources import ROOT, linked_files, page_of, source_page, with_site_links

API = "<!-- api -->"
DATED = ("decisions/0", "experiments.md")
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
        files.append(File.generated(config, page, content=notebook_page(path)))
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
    site = Path(config.site_dir)
    for page, markdown in _pages.values():
        write_page(site, page, as_text(markdown))
    write_index(site, _in_navigation, (ROOT / "docs" / "index.md").read_text("utf-8"))
