"""The site for programs that read text: every page as .md next to its .html, and llms.txt."""

from pathlib import Path
from typing import Any


def write_page(site: Path, page: Any, markdown: str) -> None:
    """Write the Markdown of a page, with what was generated in it, next to its .html file.

    Also under the name of its source, to which links in other pages lead: README.md is index.html.
    """
    for path in {(site / page.file.dest_uri).with_suffix(".md"), site / page.file.src_uri}:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown, "utf-8")


def write_index(site: Path, pages: list[Any], first_page: str) -> None:
    """llms.txt: what the project is, and one line per page, in the order of the navigation."""
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
    (site / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")
