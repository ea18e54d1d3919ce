"""Pages of the notebooks: their text and code as Markdown. The files have no outputs."""

import json
from pathlib import Path


def notebook_page(path: Path) -> str:
    """Markdown of a notebook, with a link to the file below its title."""
    cells = [_cell(cell) for cell in json.loads(path.read_text("utf-8"))["cells"]]
    title, _, rest = cells[0].partition("\n\n")
    link = f"Download [{path.name}]({path.name}) to run it: `jupyter lab {path.name}`."
    return "\n\n".join([title, link, rest, *cells[1:]]) + "\n"


def _cell(cell: dict[str, str | list[str]]) -> str:
    source = "".join(cell["source"])  # a text, or a list of its lines
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
