"""Every block of commands in README and docs runs, in the order of its page, or says why not.

The commands run where a reader would have data and runs of these names. Models are small: what a
command does not set is overridden. Options that only make it faster or larger are left out.
"""

import gzip
import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from tests.support.commands import ENVIRONMENT, run_txl
from tests.support.documents import (
    HAS_OWN_MARKS,
    ROOT,
    Block,
    blocks,
    commands_outside_blocks,
    pages,
)

SMALL = (
    *("data.num_lanes=4", "data.lanes_per_step=null", "data.tgt_len=16"),
    *("model.n_layer=1", "model.d_model=16"),
    *("model.n_head=2", "model.d_head=8", "model.d_inner=16", "training.num_steps=3"),
    *("optimizer.warmup_steps=0", "evaluation.interval_steps=3", "evaluation.max_tokens=2000"),
)
LENGTHS = ("training.num_steps", "optimizer.warmup_steps", "evaluation.interval_steps")
"""Settings of SMALL that replace those of a command."""
SMALLER = {"--positions": "20", "--vocab-size": "300"}
"""Values of options that would take long on a small machine, or need more text."""
LEFT_OUT = ("--workers", "--ranks")
FROM_TEXTS = ("README.md", "docs/reference/commands.md")
"""Pages that prepare what they read."""
QUICK = (
    "docs/how_to/keep_splits.md",
    "docs/how_to/use_memory_in_your_own_loop.md",
    "docs/reference/settings.md",
    "docs/tutorials/agents.md",
)
"""Pages that train nothing and score nothing."""
PAGES = [page for page in pages() if page != HAS_OWN_MARKS]
WITH_BLOCKS = [page for page in PAGES if any(block.is_here for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_run_by_a_test_or_says_why_not(page: str) -> None:
    assert not commands_outside_blocks(page), "write them in a fenced block"
    for block in blocks(page):
        if block.run_by:
            text = (ROOT / block.run_by).read_text("utf-8")
            names = [Path(page).name, *re.findall(r"[\w.-]+\.(?:py|md)", block.content)]
            assert any(name.removesuffix(".py") in text for name in names), block
        elif block.not_run is not None:
            assert len(block.not_run.split()) > 1, f"{block}: give the reason"
        else:
            assert page in WITH_BLOCKS


def test_an_unmarked_block_of_a_new_page_would_run() -> None:
    here = [block for page in WITH_BLOCKS for block in blocks(page) if block.is_here]
    assert len(WITH_BLOCKS) > 10
    assert set(QUICK) <= set(WITH_BLOCKS)
    assert {block.language for block in here} == {"bash", "python"}


@pytest.mark.parametrize("page", QUICK)
def test_the_blocks_of_a_quick_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_page(page)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a dataset and small runs of the names that pages use."""
    folder = tmp_path_factory.mktemp("documents")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        execute("txl prepare books/ --out data/books --split valid=0.2,test=0.2")
        execute("txl config init run --data data/books")
        Path("data/mine").symlink_to("books")
        execute("txl config init mine")
        for run in ("my_run", "books", "memory", "no_memory"):
            settings = "model.mem_len=0" if run == "no_memory" else ""
            books = f"tracking.experiment=books {settings}"
            execute(f"txl train run.yaml directory=runs/{run} {books}")
        Path("RUN").symlink_to("runs/my_run")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", FROM_TEXTS)
def test_the_blocks_of_a_page_run_from_texts_to_a_model(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_page(page)
    assert [*Path("runs").glob("*/LATEST")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in WITH_BLOCKS if page not in (*QUICK, *FROM_TEXTS)]
)
def test_the_blocks_of_a_page_run(
    page: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = copytree(trained, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(here)
    if page == "docs/how_to/mix_corpora.md":
        mixture = (
            "mixture: {web: {path: data/web, weight: 3}, books: {path: data/books, weight: 1}}"
        )
        text = Path("run.yaml").read_text().replace("path: data/books", mixture)
        Path("run.yaml").write_text(text)
        for name in ("data", "runs"):
            Path(name).rename(f"other-{name}")
    if page in ("docs/tutorials/your_own_corpus.md", "configs/README.md"):
        Path("mine.yaml").unlink()
        Path("data/mine").unlink()
    if page == "docs/tutorials/what_memory_is_worth.md":
        Path("runs/memory").rename("runs/mine")
    run_page(page)
    if page == "docs/how_to/track_with_mlflow.md":
        client = MlflowClient(tracking_uri="sqlite:///runs/mlflow.db")  # as `mlflow ui` opens it
        (experiment,) = client.search_experiments(filter_string="name = 'books'")
        names = {run.info.run_name for run in client.search_runs([experiment.experiment_id])}
        assert names == {"my_run", "books", "memory", "no_memory"}


@pytest.mark.slow
def test_every_metric_of_a_run_is_on_the_page_of_metrics(trained: Path) -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    documented = set(re.findall(r"`([\w/]+)`", page))
    lines = (trained / "runs" / "my_run" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    assert "valid/loss" in names
    assert {name.replace("valid/", "SPLIT/") for name in names} <= documented


def run_page(page: str) -> None:
    names: dict[str, object] = {"losses": np.ones((2, 3, 50))}  # of somebody's own program
    for block in blocks(page):
        if block.is_here:
            run_block(block, names)


def run_block(block: Block, names: dict[str, object]) -> None:
    if block.language == "python":
        exec(block.content, names)
        return
    for line in block.content.replace("\\\n", " ").splitlines():
        if shlex.split(line, comments=True):
            execute(line)


def execute(line: str) -> None:
    """Run one line of a shell, txl in this process if it is alone."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["pip", "install"]:
        return
    if words[0] != "txl" or ">" in words:
        txl = f'txl() {{ {sys.executable} -m txl_dist "$@"; }}'
        shell = ["bash", "-euc", f"{txl}; {line.replace('python ', f'{sys.executable} ')}"]
        subprocess.run(shell, check=True, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, timeout=300)
        return
    code, output = run_txl(*smaller(words[1:]))
    assert code == 0, f"{line}\n{output}"


def smaller(words: list[str]) -> list[str]:
    """The same command for a small machine: small models, no Ray."""
    kept: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        if word in LEFT_OUT or before in LEFT_OUT:
            continue
        kept.append(SMALLER.get(before, word))
    if words[0] == "train":
        kept = [word for word in kept if not word.startswith(tuple(f"{key}=" for key in LENGTHS))]
        given = {word.partition("=")[0] for word in kept}
        config = Path(words[1])
        if config.is_file() and "init_from:" in config.read_text():
            given |= {word.partition("=")[0] for word in SMALL if word.startswith("model.")}
        kept += [setting for setting in SMALL if setting.partition("=")[0] not in given]
        kept += [] if "--on" in words else ["--on", "processes"]
    return kept


def write_inputs(folder: Path) -> None:
    """Files of the names that pages use: other people's books, songs and pages of the web."""
    texts = {
        name: [
            f"Once there was a text of {name}, number {number}. {'It went on. ' * 150}"
            for number in range(30)
        ]
        for name in ("books", "more", "held", "web", "shards")
    }
    for name in ("books", "more", "held"):
        (folder / name).mkdir()
        for number, text in enumerate(texts[name]):
            (folder / name / f"{name}-{number}.txt").write_text(text)
    (folder / "web").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts["web"])
    (folder / "web" / "page.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "songs").mkdir()
    for number in range(30):
        song = {"ids": [1 + (number + step) % 130 for step in range(50)]}
        (folder / "songs" / f"{number}.json").write_text(json.dumps(song))
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards" / "0.tar.gz", "w:gz") as archive:
        for number, text in enumerate(texts["shards"]):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    (folder / "checked.txt").write_text("A text that somebody has checked.")
    (folder / "prompts.jsonl").write_text('{"prompt": "Once"}\n{"prompt": "It"}\n')
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "transfo-xl-dir").symlink_to(ROOT / "tests" / "hf-transfo-xl")
