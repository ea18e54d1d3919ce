"""The notebooks of docs/notebooks: stripped, on the public API, and they run from top to bottom."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

import txl_dist

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
SMALL = {
    "TXL_NOTEBOOK_STEPS": "3",
    "TXL_NOTEBOOK_SCORED": "300",
    "TXL_NOTEBOOK_FILES": "a*.py",
    "TXL_NOTEBOOK_WINDOWS": "4",
    "OMP_NUM_THREADS": "1",
}


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_of(book: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_stripped_and_the_file_is_valid(name: str) -> None:
    book = read(name)
    nbformat.validate(book)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
        assert not cell.metadata
    assert {*book.metadata} == {"kernelspec", "language_info"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_parse_and_use_public_names_only(name: str) -> None:
    trees = [ast.parse(source) for source in code_of(read(name))]
    imported = [node for tree in trees for node in ast.walk(tree)]
    ours = [
        node
        for node in imported
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] in ("txl_dist", "data_pipeline", "cluster")
    ]
    assert [node.module for node in ours] == ["txl_dist"]
    names = {alias.name for node in ours for alias in node.names}
    assert names
    assert names <= {*txl_dist.__all__}
    # No cell but the first sets a size, so that a reader changes all of them in one place.
    settings = [re.findall(r"TXL_NOTEBOOK_\w+", source) for source in code_of(read(name))]
    assert {*settings[0]} <= {*SMALL, "TXL_NOTEBOOK_WORK"}
    assert settings[0]
    assert not any(settings[1:])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_lead_to_files(name: str) -> None:
    texts = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
    links = [link for text in texts for link in re.findall(r"\]\(([^)#]+)\)", text)]
    assert links
    for link in links:
        assert (FOLDER / link).exists(), link


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    for setting, value in (SMALL | {"TXL_NOTEBOOK_WORK": str(tmp_path / "work")}).items():
        monkeypatch.setenv(setting, value)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    book = read(name)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=1800, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    expected = {
        "a_memory_for_agents": ["equals the window: True", "memory  0: mean reward", "same: True"],
        "ten_minutes_to_a_model": ["bits_per_byte", "def read_lines", "transformer_xl.py"],
        "what_memory_is_worth": ["memory 256 in the evaluation", "trained without a memory"],
    }
    for text in expected[name]:
        assert text in printed
    if name == "what_memory_is_worth":
        assert any("image/png" in output.get("data", {}) for output in outputs)
