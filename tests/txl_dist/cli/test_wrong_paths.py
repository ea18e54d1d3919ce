"""A command that is given a path of another kind says what it is, and what to give instead."""

from pathlib import Path

import pytest

from tests.support.commands import run_txl
from tests.txl_dist.checkpoint import saving
from txl_dist.convert.stored_model import find_model, write_exported

CONFIG = "data: {path: DATA}\ndirectory: new\ntraining: {num_steps: 1}\n"
CHECKPOINT = "RUN/checkpoints/step-00000001"
NO_DATASET = {
    CHECKPOINT: f"{CHECKPOINT} is a checkpoint, not a dataset; give the directory of txl prepare",
    "RUN": "RUN is a run directory, not a dataset; its dataset is data.path in RUN/config.yaml",
    "NEW_RUN": "NEW_RUN is a run directory, not a dataset",
    "EXPORTED": "EXPORTED is an exported model, not a dataset; give the directory of txl prepare",
    "TEXT": "TEXT is a directory, not a dataset; make one of its text: txl prepare TEXT --out DIR",
    "TEXT/a.txt": "TEXT/a.txt is a file, not a dataset; make one of its text: txl prepare TEXT/a.t",
    "run.yaml": "run.yaml is a config file, not a dataset; give the directory of txl prepare",
    "REJECTS": "Create it: txl prepare INPUT --out REJECTS",
    "EMPTY": "Create it: txl prepare INPUT --out EMPTY",
    "NONE": "Create it: txl prepare INPUT --out NONE",
}
SWAPPED = "DATA is a dataset; the order is txl {} CHECKPOINT DATA"
NO_MODEL = "DATA is a dataset; expected a run directory or a checkpoint"
WRONG = {
    ("data", "verify", CHECKPOINT): (3, NO_DATASET[CHECKPOINT]),
    ("data", "push", CHECKPOINT, "s3://b/d"): (3, NO_DATASET[CHECKPOINT]),
    ("config", "init", "a", "--data", CHECKPOINT): (3, NO_DATASET[CHECKPOINT]),
    ("train", "run.yaml", f"data.path={CHECKPOINT}"): (3, NO_DATASET[CHECKPOINT]),
    ("prepare", "TEXT", "--out", CHECKPOINT): (3, NO_DATASET[CHECKPOINT]),
    ("train", "run.yaml", "init_from=DATA"): (4, f"init_from: {NO_MODEL}"),
    ("eval", "DATA", "RUN"): (4, SWAPPED.format("eval")),
    ("recl", "DATA", "RUN"): (4, SWAPPED.format("recl")),
    ("attention", "DATA", "RUN"): (4, SWAPPED.format("attention")),
    ("generate", "DATA"): (4, NO_MODEL),
    ("export", "DATA", "--out", "OUT"): (4, NO_MODEL),
    ("checkpoint", "verify", "DATA"): (4, NO_MODEL),
    ("bench", "eval-speed", "--checkpoint", "DATA"): (4, NO_MODEL),
    ("import", "DATA", "--out", "OUT"): (4, "DATA is a dataset, not a model to import"),
    ("export", "EXPORTED", "--out", "OUT"): (4, "EXPORTED is an exported model and contains no"),
    ("checkpoint", "verify", "EXPORTED"): (4, "EXPORTED is an exported model and contains no"),
    ("checkpoint", "verify", "NEW_RUN"): (4, "NEW_RUN is a run directory and contains no complete"),
    ("checkpoint", "list", "DATA"): (4, "DATA is a dataset; give a run directory"),
    ("train", "RUN"): (
        2,
        "RUN is a run directory, not a config file; did you mean RUN/config.yaml?",
    ),
    ("train", "DATA"): (2, "DATA is a dataset, not a config file"),
    ("train", "none.yaml"): (2, "none.yaml does not exist"),
    ("prepare", "DATA", "--out", "OUT"): (3, "DATA is a dataset, not text to prepare"),
    ("prepare", "RUN", "--out", "OUT"): (3, f"{CHECKPOINT} is a checkpoint, not text to prepare"),
}


@pytest.fixture
def here(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one path of each kind."""
    monkeypatch.chdir(tmp_path)
    Path("DATA").symlink_to(dataset)
    for name in ("RUN", "NEW_RUN"):
        Path(name, "logs").mkdir(parents=True)
        Path(name, "config.yaml").write_text(CONFIG)
    saving.save(Path("RUN"), step=1)
    model, tokenizer = find_model("RUN").load_with_tokenizer()
    write_exported("EXPORTED", model, tokenizer)
    for name in ("TEXT", "EMPTY", "REJECTS"):
        Path(name).mkdir()
    Path("TEXT/a.txt").write_text("text")
    Path("REJECTS/rejects.jsonl").write_text("")
    Path("run.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize("path", NO_DATASET)
def test_what_is_no_dataset_is_named(here: Path, path: str) -> None:
    code, output = run_txl("data", "inspect", path)
    assert (code, NO_DATASET[path] in output) == (3, True), output
    assert "remove" not in output


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_path_of_another_kind_is_named(here: Path, words: tuple[str, ...]) -> None:
    code, message = WRONG[words]
    result = run_txl(*words)
    assert (result[0], message in result[1]) == (code, True), result
    assert (here / CHECKPOINT / "manifest.json").is_file()


def test_a_run_without_a_checkpoint_has_an_empty_list(here: Path) -> None:
    assert run_txl("checkpoint", "list", "NEW_RUN") == (
        0,
        "NEW_RUN has no complete checkpoint yet\n",
    )
