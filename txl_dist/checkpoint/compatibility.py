"""Who may resume from a checkpoint: which settings may differ, and who has to say so.

Three kinds of settings. Those that change no number may differ freely. Those that change the
trajectory but leave state and model meaningful need `--allow-change KEY`. All others make it
another model or other data, and the checkpoint's memory and position would be wrong for them.
"""

from collections.abc import Collection, Mapping
from typing import Any

from data_pipeline.manifest import ShardManifest
from txl_dist.checkpoint.manifest import CheckpointManifest
from txl_dist.config_file import default_settings
from txl_dist.errors import CheckpointError, DataError

_FREE = (
    "directory",
    "data.path",
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
    checkpoint: CheckpointManifest, data: ShardManifest, *, allow_change: bool, where: str
) -> None:
    """Raises CheckpointError for another tokenizer, DataError for other data under the same one."""
    if checkpoint.tokenizer_digest != data.tokenizer_digest:
        raise CheckpointError(
            f"{where} was trained with tokenizer {checkpoint.tokenizer_digest} "
            f"({checkpoint.vocab_size} ids), the data has {data.tokenizer_digest} "
            f"({data.vocab_size} ids). Its token ids mean other text; set data.path to data "
            "prepared with the checkpoint's tokenizer"
        )
    if checkpoint.data_digest != data.digest and not allow_change:
        raise DataError(
            f"{where} was trained on data with digest {checkpoint.data_digest}, data.path has "
            f"{data.digest}: its reading position means other text there. Set data.path back, or "
            "accept the change with --allow-data-change"
        )
