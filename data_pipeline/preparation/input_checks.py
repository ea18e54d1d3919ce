"""Whether what the scan found may become a dataset: text in it, few rejects, no file broken off."""

from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.preparation.input_index import InputIndex
from data_pipeline.readers import Reject
from data_pipeline.shards.manifest import REJECTS_NAME
from data_pipeline.storage.atomic_files import explain_disk_errors, fsync_directory


def require_usable(index: InputIndex, staging: Path, out: Path, max_reject_rate: float) -> None:
    """Raises DataError for no text, too many rejects and files that break off.

    The list of rejects that is in `staging` is then in `out`.
    """
    _require_whole(index, staging, out, max_reject_rate)
    rejected = index.rejected
    records = len(index) + index.empty + rejected
    if rejected and (rejected > max_reject_rate * records or not len(index)):
        _keep_list(staging, out)
        shown = _listed(index.first_rejects, rejected)
        advice = (
            ", or leave them out with a higher --max-reject-rate"
            if len(index)
            else "; no usable document is left"
        )
        raise DataError(
            f"{rejected:,} of {records:,} records cannot be used, the limit is "
            f"{max_reject_rate:.4%}; no dataset was written.{shown}\nAll are listed in "
            f"{out / REJECTS_NAME}. Repair them and run this again{advice}."
        )
    if not len(index):
        raise DataError(
            f"the input holds no text: {len(index.files)} files, {index.empty} empty documents "
            f"and no other. Give files with text in them: txl prepare INPUT --out {out}"
        )


def _require_whole(index: InputIndex, staging: Path, out: Path, max_reject_rate: float) -> None:
    """A file that breaks off is one Reject, whatever was behind it: no rate can weigh that."""
    if index.broken_files and max_reject_rate < 1:
        _keep_list(staging, out)
        advice = ", or accept the loss with --max-reject-rate 1" if len(index) else ""
        raise DataError(
            f"{index.broken_files:,} of {len(index.files):,} files cannot be "
            "read to their end, and what is behind that is lost; no dataset was written."
            f"{_listed(index.first_broken, index.broken_files)}\nAll are listed in "
            f"{out / REJECTS_NAME}. Repair these files or leave them out{advice}."
        )


def _keep_list(staging: Path, out: Path) -> None:
    with explain_disk_errors("writing the list of rejects", out):
        (staging / REJECTS_NAME).replace(out / REJECTS_NAME)
        fsync_directory(out)


def _listed(first: list[Reject], count: int) -> str:
    more = f"\n  and {count - len(first):,} more" if count > len(first) else ""
    return "".join(f"\n  {reject}" for reject in first) + more
