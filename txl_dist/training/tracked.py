"""What a run tells the tracking process at its start: its datasets, and facts for tags."""

from data_pipeline.system.sources import shown
from txl_dist.config.data_config import TRAIN_SPLIT
from txl_dist.tracking.process import TrackingProcess
from txl_dist.tracking.tracker import TrackedDataset, dataset_name
from txl_dist.training.context import RankContext
from txl_dist.training.data import Corpus, TrainingData


def start_tracker(rank: RankContext) -> TrackingProcess | None:
    """Start sending metrics to MLflow. The status of the run depends on how `stack` ends."""
    # Rank 0 only: MLflow would record one copy per rank.
    if not (rank.world.is_rank_zero and rank.config.tracking.enabled):
        return None
    corpora = rank.data.corpora
    tags = {"num_ranks": str(rank.world.num_ranks)}
    if len(corpora) > 1:
        tags |= {f"data.{corpus.name}": corpus.manifest.digest for corpus in corpora}
    tracker = TrackingProcess.start(
        rank.directory.path,
        rank.config,
        tags=tags,
        datasets=tracked_datasets(rank.data),
    )
    return rank.stack.enter_context(tracker)


def tracked_datasets(data: TrainingData) -> list[TrackedDataset]:
    """The splits that a run trains on and scores, as a tracker records them."""
    datasets = [_tracked(corpus, TRAIN_SPLIT, "training") for corpus in data.corpora]
    if (evaluated := data.evaluation) is not None:
        datasets.append(_tracked(evaluated.corpus, evaluated.name, "evaluation"))
    return datasets


def _tracked(corpus: Corpus, split: str, context: str) -> TrackedDataset:
    manifest = corpus.manifest
    entry, source = manifest.splits[split], shown(str(corpus.directory))
    return TrackedDataset(
        name=dataset_name(source, split),
        digest=manifest.digest,
        source=source,
        context=context,
        profile={
            "tokens": entry.tokens,
            "documents": entry.documents,
            "text_bytes": entry.text_bytes if manifest.has_text else None,
            "vocab_size": manifest.vocab_size,
            "dtype": manifest.dtype,
            "tokenizer_sha256": manifest.tokenizer_digest,
        },
    )
