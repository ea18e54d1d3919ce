"""Which split a run evaluates: by default `valid`, if the data has it; the log names it."""

from pathlib import Path

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, metrics, tiny_spec, train
from txl_dist.errors import DataError
from txl_dist.training.data import TrainingData

DEFAULT = "evaluation={interval_steps: 8, max_tokens: 50}"


@pytest.fixture(scope="module")
def train_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset without a valid split."""
    text = tmp_path_factory.mktemp("text") / "a.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    out = tmp_path_factory.mktemp("data") / "train-only"
    prepare_dataset([text], out, PrepareSettings())
    return out


@pytest.fixture(scope="module")
def chapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 40 documents in one block."""
    text = tmp_path_factory.mktemp("text") / "chapters.txt"
    text.write_text("".join(f"chapter {n} {'la ' * (n % 7)}\n" for n in range(40)))
    out = tmp_path_factory.mktemp("data") / "chapters"
    prepare_dataset([text], out, PrepareSettings(format="lines"))
    return out


def _log(run: Path) -> str:
    return (run / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("data", "setting", "scored", "text"),
    [
        ("dataset", DEFAULT, [8, 16, 20], "tokens of split 'valid' of {} | every 8 steps and at"),
        ("train_only", DEFAULT, [], "no evaluation, no score and no BEST checkpoint: no data of"),
        ("dataset", NO_EVALUATION, [], "evaluation | none, because evaluation.split=null"),
    ],
)
def test_the_valid_split_is_scored_if_there_is_one_and_the_log_says_so(
    ranks: RankGroups, request: pytest.FixtureRequest, tmp_path: Path,
    data: str, setting: str, scored: list[int], text: str,
) -> None:  # fmt: skip
    path = request.getfixturevalue(data)
    assert ranks(1).run(train, tiny_spec(path, tmp_path, setting)) == [0]
    assert [line["step"] for line in metrics(tmp_path) if "valid/loss" in line] == scored
    assert (tmp_path / "BEST").exists() == bool(scored)
    assert text.format(path) in _log(tmp_path)
    assert ("--split valid=0.01" in _log(tmp_path)) == (data == "train_only"), "how to get one"


def test_a_split_that_no_corpus_has_is_refused(train_only: Path, tmp_path: Path) -> None:
    spec = tiny_spec(train_only, tmp_path, "evaluation.split=valid")
    with pytest.raises(DataError, match="has no split 'valid'; it has train"):
        TrainingData.open(spec.config, num_ranks=1)


@pytest.mark.parametrize(("reset", "in_order"), [("stream", True), ("document", False)])
def test_a_memory_that_continues_is_that_of_the_document_before(
    ranks: RankGroups, chapters: Path, tmp_path: Path, reset: str, in_order: bool
) -> None:
    settings = (NO_EVALUATION, f"data.reset={reset}", "data.num_lanes=2", "training.num_steps=9")
    for shuffle in ("blocks", "none"):
        spec = tiny_spec(chapters, tmp_path / shuffle, *settings, f"data.shuffle={shuffle}")
        assert ranks(1).run(train, spec) == [0]
    # One block: shuffled blocks differ from the order of the corpus only inside it.
    assert (losses(tmp_path / "blocks") == losses(tmp_path / "none")) == in_order


def test_a_memory_that_continues_over_documents_shuffled_before_is_a_warning(
    ranks: RankGroups, tmp_path: Path
) -> None:
    text, data = tmp_path / "lines.txt", tmp_path / "data"
    text.write_text("".join(f"line {n}\n" for n in range(20)))
    prepare_dataset([text], data, PrepareSettings(format="lines", shuffle=1))
    for reset in ("document", "stream"):
        settings = (NO_EVALUATION, f"data.reset={reset}", "training.num_steps=4")
        assert ranks(1).run(train, tiny_spec(data, tmp_path / reset, *settings)) == [0]
        warns = f"{data} was prepared with --shuffle" in _log(tmp_path / reset)
        assert warns == (reset == "stream")
