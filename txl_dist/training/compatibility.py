"""Which settings and data may differ between a checkpoint and the run that resumes from it.

There are three kinds of settings. Those that affect no number may differ freely. Those that change
the trajectory, but for which weights and position stay valid, need `--allow-change KEY`; the memory
is rebuilt if it does not fit (`start.py`). All others define another model or another
token order, for which the checkpoint's weights or position would be wrong; they cannot change.
"""

from collections.abc import Collection, Mapping
from typing import Any

from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.tokenizers.loading import StoredTokenizer, differences
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import (
    TOKENIZER_NAME,
    CheckpointManifest,
    load_checkpoint_manifest,
)
from txl_dist.config.config_file import default_settings, flatten_config
from txl_dist.config.data_config import SINGLE_CORPUS_NAME
from txl_dist.config.removed import without_removed
from txl_dist.errors import CheckpointError, DataError
from txl_dist.training.data import TrainingData
from txl_dist.training.phases import PhaseChange
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import TrainState, load_state

MIXTURE = "data.mixture"

_FREE = (
    "directory",
    "data.path",
    MIXTURE,  # compared by `check_data`: by digests and shares
    "data.prefetch_segments",  # of runs that older versions began
    "data.cache_",
    "model.attention",
    "model.recipe",  # its settings are compared themselves
    "model.vocab_size",
    "training.num_tokens",  # of older versions, which resolved them to training.num_steps
    "training.num_epochs",
    "training.micro_batch_lanes",
    "training.log_interval_steps",
    "training.checkpoint_",
    "training.keep_",
    "training.rank_timeout_seconds",
    "training.grace_seconds",
    "training.activation_checkpointing",
    "training.compile",
    "training.deterministic",
    "training.profile_steps",  # of older versions
    "evaluation.",
    "tracking.",
    "deepspeed.",
    "ray.",
)
_ON_REQUEST = (
    "deepspeed.extra.communication_data_type",
    "optimizer.",
    "training.num_steps",
    "training.memory_dtype",
    "data.num_lanes",
    "data.lanes_per_step",
    "data.tgt_len",
    "model.mem_len",
    "model.mem_shares",
    "model.dropout",
    "model.dropatt",
    "precision",
    "divergence.",
)
OPEN_SECTIONS = ("optimizer.lr_factors.", "deepspeed.extra.")
"""Sections without fixed keys: a checkpoint may have one that the config lacks."""
_FIXED = ("optimizer.name", "optimizer.averaging")
"""Exceptions to _ON_REQUEST: the checkpoint lacks the states of another optimizer."""
_BETWEEN_TURNS = ("data.num_lanes", "data.lanes_per_step", "data.tgt_len", "model.mem_")
"""Settings that change only where all lanes are at one position, like the data."""


def may_differ(key: str) -> bool:
    """Whether weights and position stay valid if this setting changes in a run."""
    return key.startswith((*_FREE, *_ON_REQUEST)) and key not in _FIXED


def require_compatible(
    manifest: CheckpointManifest,
    state: TrainState,
    path: DatasetPath,
    *,
    spec: TrainSpec,
    data: TrainingData,
) -> None:
    """Raises CheckpointError or DataError if `spec` cannot continue from this checkpoint."""
    check_data(manifest, state, path, spec=spec, data=data)
    settings = flatten_config(spec.config)
    check_config(manifest.run, settings, allowed=spec.allow_change, checkpoint=str(path))
    if changed := changed_between_turns(manifest, state, spec=spec, data=data):
        old = {**default_settings(), **manifest.run}
        turns = old["data.num_lanes"] // old["data.lanes_per_step"]
        raise CheckpointError(
            f"{path}: {', '.join(changed)} cannot change here. The lanes are read in {turns} turns "
            f"(data.lanes_per_step), and {state.turn} of them are a segment ahead of the others. "
            f"Resume without the change to step {state.step + turns - state.turn}, or from an "
            f"older checkpoint: at every {turns}th step all lanes are at one position"
        )


def changed_between_turns(
    manifest: CheckpointManifest, state: TrainState, *, spec: TrainSpec, data: TrainingData
) -> list[str]:
    """What differs from this checkpoint, although some of its lanes are a segment ahead of others.

    Only at a checkpoint where all lanes are at one position may it change.
    """
    if not state.turn:
        return []
    old = {**default_settings(), **manifest.run}
    changed = [
        key for key, value in flatten_config(spec.config).items()
        if key.startswith(_BETWEEN_TURNS) and value != old.get(key)
    ]  # fmt: skip
    if PhaseChange.between(state.phases[-1], data.phase):
        changed.append("the data")
    return changed


def check_newest_checkpoint(spec: TrainSpec, data: TrainingData) -> None:
    """`require_compatible` with the checkpoint that the ranks will probably resume from.

    Before they start, because that takes long. A checkpoint that is damaged or cannot be read here
    is left to them.
    """
    checkpoints = CheckpointDirectory(spec.run_path)
    step = checkpoints.newest_step() if spec.resume == "auto" else None
    if step is None:
        return
    path = checkpoints.at(step)
    try:
        manifest = load_checkpoint_manifest(path)
        state = load_state(path, manifest)
    except CheckpointError:
        return
    require_compatible(manifest, state, path, spec=spec, data=data)


def check_config(
    old: Mapping[str, Any], new: Mapping[str, Any], *, allowed: Collection[str], checkpoint: str
) -> None:
    """Compare resolved configs by dotted key. Raises CheckpointError that lists the differences."""
    lines = []
    # A setting added in a later version had its default value when the checkpoint was written.
    old = {**default_settings(), **without_removed(old)}
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        # A weight that is frozen has no states of the optimizer.
        freezes = key.startswith("optimizer.lr_factors.") and 0 in (before, after)
        # `deepspeed.*` may change, except communication_data_type, which changes the numbers.
        on_request = key.startswith(_ON_REQUEST) and not (key in _FIXED or freezes)
        may_change = key in allowed if on_request else key.startswith(_FREE)
        if before == after or may_change:
            continue
        remedy = "cannot change in a run; begin a new one in another directory"
        if on_request:
            remedy = f"--allow-change {key}"
        elif freezes:
            remedy += f", from these weights: init_from={checkpoint}"
        lines.append(f"\n  {key}: checkpoint {before!r}, now {after!r} -> {remedy}")
    if lines:
        raise CheckpointError(f"{checkpoint} was written with other settings:{''.join(lines)}")


def check_data(
    manifest: CheckpointManifest,
    state: TrainState,
    checkpoint: DatasetPath,
    *,
    spec: TrainSpec,
    data: TrainingData,
) -> None:
    """Raises CheckpointError for another tokenizer or mixture, DataError for other data."""
    trained = StoredTokenizer(checkpoint / TOKENIZER_NAME, manifest.tokenizer_digest)
    if changes := differences(trained, data.corpora[0].tokenizer):
        raise CheckpointError(
            f"{checkpoint} was trained with another tokenizer than that of the data: {changes}. "
            "The same ids have another meaning. Prepare the text with the checkpoint's tokenizer "
            f"and set data.path to it: txl prepare INPUT --out NEW_DIR --tokenizer {trained.path}"
        )
    change = PhaseChange.between(state.phases[-1], data.phase)
    for before, corpus in () if spec.allow_data_change else change.replaced:
        key = (
            "data.path" if corpus.name == SINGLE_CORPUS_NAME else f"data.mixture.{corpus.name}.path"
        )
        raise DataError(
            f"{checkpoint} was trained on data with digest {before.digest}, {key} has "
            f"{corpus.digest}: the reading position refers to other text there. Restore {key}, or "
            "accept the change with --allow-data-change"
        )
    if change.mixture and MIXTURE not in spec.allow_change:
        raise CheckpointError(
            f"{checkpoint} was written with another mixture:"
            + "".join(f"\n  {MIXTURE}.{line}" for line in change.mixture)
            + f"\nRestore it, or use the new one from this step: --allow-change {MIXTURE}"
        )
