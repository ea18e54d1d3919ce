"""Pages of files outside docs/ to which documents link: code, configs, tests and READMEs.

The site has copies of them, so that no link leads to a forge.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(\]\()([^)\s#]+)?(#[^)\s]*)?(\))")
_CODE = re.compile(r"^ *(```+).*?^ *\1 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".css": "css"}


def repository_path(target: str, source: str) -> str | None:
    """Path in the repository that a link in `source` (a path in docs/) leads to; None: a URL."""
    if re.match(r"[a-z]+:", target):
        return None
    place = (
        source.removeprefix("source/").removesuffix(".md")
        if source.startswith("source/")
        else f"docs/{source}"
    )
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), target))


def linked_files(docs: Path) -> list[str]:
    """Files and folders outside docs/ that documents lead to, and those that these lead to."""
    found: list[str] = []
    waiting = [
        (path.relative_to(docs).as_posix(), path.read_text("utf-8")) for path in docs.rglob("*.md")
    ]
    while waiting:
        source, text = waiting.pop()
        for _, target, _, _ in _LINK.findall(_CODE.sub("", text)):
            path = repository_path(target, source) if target else None
            if path is None or path in found or path == "docs" or path.startswith(("docs/", "..")):
                continue
            if (ROOT / path).exists():  # mkdocs reports a link to a missing file
                found.append(path)
                if path.endswith(".md"):
                    waiting.append((page_of(path), (ROOT / path).read_text("utf-8")))
    return sorted(found)


def page_of(path: str) -> str:
    """Path in docs/ of the page of a file of the repository."""
    return f"source/{path}.md"


def source_page(path: str) -> str:
    """Markdown of that page. Search does not find it: pages about the subject come first."""
    header = "---\nsearch: {exclude: true}\n---\n"
    file = ROOT / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.name[0] not in "._")
        return f"{header}# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = file.read_text("utf-8")
    if file.suffix == ".md":
        return header + text
    language = _LANGUAGES.get(file.suffix, "text")
    return f"{header}# {path}\n\n``````{language}\n{text}\n``````\n"


def with_site_links(markdown: str, source: str) -> str:
    """Let links to files outside docs/, or from such a file, lead to pages of the site."""

    def rewrite(match: re.Match[str]) -> str:
        opened, target, anchor, closed = match.groups(default="")
        path = repository_path(target, source) if target else None
        if path is None or not (ROOT / path).exists():
            return match[0]
        if path.startswith("docs/"):
            page = path.removeprefix("docs/")
            page = f"{page}/README.md" if (ROOT / path).is_dir() else page
            if not source.startswith("notebooks/"):  # the page of a notebook offers the file
                page = re.sub(r"\.ipynb$", ".md", page)
        else:
            page = page_of(path)
        return opened + posixpath.relpath(page, posixpath.dirname(source)) + anchor + closed

    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(rewrite, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(rewrite, markdown[end:])])
