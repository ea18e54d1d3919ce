"""A run does not go on with another tokenizer, even one whose ids fit the model."""

from pathlib import Path

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.shards.manifest import load_manifest
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, tiny_job
from txl_dist.errors import CheckpointError
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank


def prepare(out: Path, text: str) -> Path:
    """A dataset whose tokenizer knows the characters of `text`."""
    corpus = out.with_suffix(".txt")
    corpus.write_text(text)
    prepare_dataset([corpus], out, PrepareSettings(tokenizer="char"))
    return out


def refusal_of(world: World, job: TrainJob) -> str:
    """Why a checkpoint is refused; empty if it is not."""
    try:
        train_rank(job, world)
    except CheckpointError as error:
        return str(error)
    return ""


def test_another_tokenizer_of_the_same_size_is_refused_whatever_is_allowed(
    ranks: RankGroups, tmp_path: Path
) -> None:
    text = "These are the same words, of as many characters. " * 20
    data = prepare(tmp_path / "data", text)
    other = prepare(tmp_path / "other", text.replace("e", "x"))
    assert load_manifest(data).vocab_size == load_manifest(other).vocab_size
    settings = (NO_EVALUATION, "training.num_steps=5")
    assert ranks(1).run(refusal_of, tiny_job(data, tmp_path / "run", *settings)) == [""]
    job = tiny_job(other, tmp_path / "run", *settings, allow_data_change=True)
    [told] = ranks(1).run(refusal_of, job)
    for directory in (data, other):
        assert load_manifest(directory).tokenizer_digest in told
