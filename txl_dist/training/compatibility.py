"""Who may resume from a checkpoint: which settings may differ, and who has to say so.

Three kinds of settings. Those that change no number may differ freely. Those that change the
trajectory but leave state and model meaningful need `--allow-change KEY`. All others make it
another model or other data, and the checkpoint's memory and position would be wrong for them.
"""

from collections.abc import Collection, Mapping
from typing import Any

from data_pipeline.shards.manifest import ShardManifest
from txl_dist.checkpoint.manifest import CheckpointManifest, CorpusEntry, Phase
from txl_dist.config.config_file import default_settings
from txl_dist.config.run_config import ONLY_CORPUS
from txl_dist.errors import CheckpointError, DataError
from txl_dist.training.phases import PhaseChange

MIXTURE = "data.mixture"

_FREE = (
    "directory",
    "data.path",
    MIXTURE,  # compared by `check_data`: by digests and shares
    "data.prefetch_segments",
    "model.attention",
    "model.vocab_size",
    "training.micro_batch_lanes",
    "training.log_interval_steps",
    "training.checkpoint_interval_steps",
    "training.keep_checkpoints",
    "training.rank_timeout_seconds",
    "evaluation.",
    "tracking.",
    "deepspeed.",
    "ray.",
)
_ON_REQUEST = ("optimizer.", "training.num_steps", "model.dropout", "model.dropatt", "precision")


def check_config(
    old: Mapping[str, Any], new: Mapping[str, Any], *, allowed: Collection[str], where: str
) -> None:
    """Compare resolved configs by dotted key; CheckpointError has a table of what differs."""
    lines = []
    # A setting that came later had its default when the checkpoint was written.
    old = {**default_settings(), **old}
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        on_request = key.startswith(_ON_REQUEST)
        if before == now or key.startswith(_FREE) or (on_request and key in allowed):
            continue
        remedy = (
            f"--allow-change {key}"
            if on_request
            else "cannot change in a run; start a new one (--resume never, another directory)"
        )
        lines.append(f"\n  {key}: checkpoint {before!r}, now {now!r} -> {remedy}")
    if lines:
        raise CheckpointError(f"{where} was written with other settings:{''.join(lines)}")


def check_data(
    checkpoint: CheckpointManifest,
    now: Phase,
    vocabulary: ShardManifest,
    *,
    allowed: Collection[str],
    allow_data_change: bool,
    where: str,
) -> None:
    """Raises CheckpointError for another tokenizer or mixture, DataError for other data in it.

    `now` is what the run would read, `vocabulary` the manifest of one of its corpora.
    """
    if checkpoint.tokenizer_digest != vocabulary.tokenizer_digest:
        raise CheckpointError(
            f"{where} was trained with tokenizer {checkpoint.tokenizer_digest} "
            f"({checkpoint.vocab_size} ids), the data has {vocabulary.tokenizer_digest} "
            f"({vocabulary.vocab_size} ids). The same ids mean other text. Prepare the text with "
            f"the checkpoint's tokenizer and set data.path to it: txl prepare INPUT --out NEW_DIR "
            f"--tokenizer {where}/tokenizer.json"
        )
    change = PhaseChange.between(_phase_of(checkpoint), now)
    for before, corpus in () if allow_data_change else change.replaced:
        at = "data.path" if corpus.name == ONLY_CORPUS else f"data.mixture.{corpus.name}.path"
        raise DataError(
            f"{where} was trained on data with digest {before.digest}, {at} has "
            f"{corpus.digest}: its reading position means other text there. Set {at} back, or "
            "accept the change with --allow-data-change"
        )
    if change.mixture and MIXTURE not in allowed:
        raise CheckpointError(
            f"{where} was written with another mixture:"
            + "".join(f"\n  {MIXTURE}.{line}" for line in change.mixture)
            + f"\nSet it back, or go on with the new one from here: --allow-change {MIXTURE}"
        )


def _phase_of(checkpoint: CheckpointManifest) -> Phase:
    """What the checkpoint's run read last."""
    if checkpoint.state.phases:
        return checkpoint.state.phases[-1]
    # Written before there were mixtures: one corpus, of which only the digest was kept.
    only = CorpusEntry(name=ONLY_CORPUS, digest=checkpoint.data_digest, tokens=1, weight=1.0)
    return Phase(corpora=(only,))
