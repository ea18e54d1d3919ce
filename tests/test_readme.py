"""The commands of README.md and docs/reference/commands.md run in order, without a warning."""

import gzip
import io
import json
import re
import shlex
import tarfile
from pathlib import Path

import pytest

from tests.support.commands import run_txl

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
SMALL = (
    *("data.num_lanes=4", "data.lanes_per_step=null", "data.tgt_len=16"),
    *("model.n_layer=1", "model.d_model=16"),
    *("model.n_head=2", "model.d_head=8", "model.d_inner=16", "training.num_steps=3"),
    "optimizer.warmup_steps=1",
)


def commands(page: Path, heading: str) -> list[list[str]]:
    """The words of the txl commands in the block that follows a line with these words."""
    text = page.read_text("utf-8").partition(heading)[2]
    block = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [words[1:] for words in lines if words and words[0] == "txl"]


def write_inputs(folder: Path) -> None:
    """What the commands read: texts of other people's books, songs and pages."""
    texts = [f"Once there was a book, number {n}. {'It went on. ' * 40}" for n in range(30)]
    for name in ("books", "web", "songs", "shards"):
        (folder / name).mkdir()
    for number, text in enumerate(texts):
        (folder / "books" / f"{number}.txt").write_text(text)
        song = {"ids": [1 + (number + step) % 130 for step in range(50)]}
        (folder / "songs" / f"{number}.json").write_text(json.dumps(song))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "web" / "page.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "checked.txt").write_text("A text that somebody has checked.")
    with tarfile.open(folder / "shards" / "0.tar.gz", "w:gz") as archive:
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    (folder / "prompts.jsonl").write_text('{"prompt": "Once"}\n{"prompt": "It"}\n')
    (folder / "transfo-xl-dir").symlink_to(ROOT / "tests" / "hf-transfo-xl")


def test_the_first_screen_has_commands_a_picture_and_the_limits() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 150, "what is longer belongs into a page of docs/"
    first = "\n".join(lines[:40])
    wanted = ("pip install", "txl prepare", "txl train", "txl eval", "make quickstart", "make test")
    places = [first.index(f"\n{command} ") for command in wanted]
    assert places == sorted(places)
    (picture,) = re.findall(r"^!\[.+\]\((.+)\)$", first, re.MULTILINE)
    assert (ROOT / picture).is_file()
    assert "docs/limitations.md" in first


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_in_order(page: Path, heading: str) -> None:
    for words in commands(page, heading):
        small = [*SMALL, "--on", "processes"] if words[0] == "train" else []
        given = [word for word in words if word not in small]
        code, output = run_txl(*given, *small)
        assert code == 0, f"txl {shlex.join(given)}\n{output}"


@pytest.mark.slow
def test_the_usage_of_the_readme_runs(desk: Path) -> None:
    run_in_order(README, "# txl-dist")
    assert (desk / "runs" / "mine" / "LATEST").exists()


@pytest.mark.slow
def test_the_usage_runs_from_text_files_to_a_model(desk: Path) -> None:
    run_in_order(COMMANDS, "## In the order of their use")
    assert (desk / "runs" / "books" / "LATEST").exists()


def test_the_other_inputs_are_prepared(desk: Path) -> None:
    run_in_order(COMMANDS, "Other inputs")
    assert sorted(path.name for path in (desk / "data").iterdir()) == [
        *("shards", "songs", "two", "web"),
    ]
