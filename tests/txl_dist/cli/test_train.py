"""`txl train` as a command: exit codes and messages."""

from pathlib import Path

import pytest

from tests.support.commands import output_of, run_txl, start_torchrun
from tests.support.training_runs import NO_EVALUATION, TINY, TinyRuns, train


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        (
            ("--on", "processes", "--ranks", "1:2"),
            2,
            ("--ranks 1:2 with --on processes", "or the address of a Ray cluster"),
        ),
        (
            ("--ranks", "7", "data.lanes_per_step=5"),
            2,
            ("7 ranks for data.lanes_per_step=5", "data.lanes_per_step=7 and data.num_lanes=7"),
        ),
        (
            ("--ranks", "7", "data.num_lanes=10", "data.lanes_per_step=5"),
            2,
            ("set for example data.lanes_per_step=7 and data.num_lanes=14",),
        ),
        (("--resume", "nosuch"), 4, ("nosuch does not exist",)),
        (("directory=",), 2, ("directory is null",)),
        (('directory=""',), 2, ("directory: is empty; name a directory for the run",)),
        (("--ranks", "6"), 2, ("6 ranks for data.num_lanes=5",)),
        (("--ranks", "2:6"), 2, ("6 ranks for data.num_lanes=5",)),
        (("--allow-change", "optimizer.lrr"), 2, ("did you mean optimizer.lr?",)),
        (("data.path=none",), 3, ("manifest.json", "txl prepare")),
        (("model.vocab_size=1000",), 3, ("model.vocab_size=1000", "257 ids")),
        (("evaluation.split=test",), 3, ("train", "valid")),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_with_what_is_legal(
    dataset: Path, tmp_path: Path, words: tuple[str, ...], code: int, texts: tuple[str, ...]
) -> None:
    for options in (("--dry-run",), ()):
        arguments = (f"data.path={dataset}", f"directory={tmp_path}", *words, *options)
        result, output = run_txl("train", TINY, *arguments)
        assert result == code, output
        for text in texts:
            assert text in output
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("tgt_len", "one_lane_is_enough"), [(9_000, True), (9_999_999, False)])
def test_fewer_lanes_are_advised_only_if_one_is_long_enough(
    dataset: Path, tmp_path: Path, tgt_len: int, one_lane_is_enough: bool
) -> None:
    words = (f"data.path={dataset}", f"directory={tmp_path}", f"data.tgt_len={tgt_len}")
    code, output = run_txl("train", TINY, *words, "--dry-run")
    assert (code, "Set data.tgt_len to at most" in output) == (2, True)
    assert ("take data.num_lanes=1 and data.lanes_per_step=1" in output) == one_lane_is_enough


@pytest.mark.fault_row(26)
def test_a_change_that_the_newest_checkpoint_refuses_is_found_before_any_rank_starts(
    tiny: TinyRuns,
) -> None:
    tiny.ranks(1).run(train, tiny.spec(tiny.path, NO_EVALUATION))
    words = ("train", TINY, f"data.path={tiny.dataset}", f"directory={tiny.path}", NO_EVALUATION)
    assert run_txl(*words, "--dry-run")[0] == 0
    for change in ("optimizer.lr=0.5", "model.n_layer=1"):
        code, output = run_txl(*words, change, "--dry-run")
        assert code == 4
        assert change.partition("=")[0] in output
    code, output = run_txl(*words, "--dry-run", "--resume", "never")
    assert (code, "--resume never would overwrite it" in output) == (2, True)
    fork = (f"directory={tiny.path / 'fork'}", "--resume", tiny.path, "--dry-run")
    assert run_txl(*words, *fork)[0] == 0
    assert run_txl(*words, *fork, "model.n_layer=1")[0] == 4
    allowed = ("optimizer.lr=0.5", "--allow-change", "optimizer.lr", "--dry-run")
    assert run_txl(*words, *allowed)[0] == 0
    factor = ("optimizer.lr_factors={head: 2}", "--allow-change", "optimizer.lr_factors.head")
    assert run_txl(*words, *factor, "--dry-run")[0] == 0
    # The ranks refuse it, or fall back to an older checkpoint.
    for manifest in tiny.path.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    assert run_txl(*words, "model.n_layer=1", "--dry-run")[0] == 0


@pytest.mark.fault_row(35)
def test_a_directory_in_use_is_refused_and_its_run_not_disturbed(
    dataset: Path, tmp_path: Path
) -> None:
    from txl_dist.training.spec import RunDirectory

    directory = RunDirectory(tmp_path)
    directory.create()
    arguments = (f"data.path={dataset}", f"directory={tmp_path}", "--on", "processes")
    with directory.locked():
        before = sorted(path.name for path in tmp_path.rglob("*"))
        code, output = run_txl("train", TINY, *arguments)
        assert code == 2
        assert "in use by another run" in output
        assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.fault_row(12)
def test_a_run_directory_that_cannot_be_written_is_refused_first(
    dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    before = sorted(dataset.iterdir())
    for directory in (tmp_path / "file", tmp_path / "file" / "run", dataset):
        for options in (("--dry-run",), ("--on", "processes")):
            arguments = (f"data.path={dataset}", f"directory={directory}", *options)
            code, output = run_txl("train", TINY, *arguments)
            assert code == 2
            assert "directory=PATH" in output
    assert "is a dataset: the files of a run would lie between its files" in output
    assert sorted(dataset.iterdir()) == before
    (tmp_path / "manifest.json").write_text('{"name": "of another program"}')
    words = ("train", TINY, f"data.path={dataset}", f"directory={tmp_path}", "--dry-run")
    assert run_txl(*words)[0] == 0


def test_torchrun_trains_too(dataset: Path, tmp_path: Path) -> None:
    arguments = (f"data.path={dataset}", f"directory={tmp_path}", "evaluation.split=null")
    process = start_torchrun("train", TINY, *arguments)
    assert "step 20 | loss" in output_of(process, 0, timeout_seconds=120)
    assert (tmp_path / "checkpoints" / "step-00000020").is_dir()
