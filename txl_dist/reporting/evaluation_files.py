"""The files of `txl eval --out DIR`, made from the objects that `txl eval --json` prints.

result.json                 that object, or the list of them
scores.csv                  one line per checkpoint, split and setting
by_document_position.csv    with --details: one line per bucket of each of these; also
by_document_position.png    by_segment_position and by_token_frequency
sweep.png                   with --sweep: perplexity of every setting
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from data_pipeline.system.files import StagedDirectory, explain_disk_errors, write_synced
from txl_dist.evaluation.breakdown import TABLES

RESULT_NAME = "result.json"
SCORES_NAME = "scores.csv"
SWEEP_PLOT_NAME = "sweep.png"
SETTINGS = ("checkpoint", "split", "weights", "tgt_len", "mem_len", "clamp_len", "same_length")
SCORES = (
    *SETTINGS,
    "selected",
    "data",
    "mode",
    "reset",
    "precision",
    "tokens_scored",
    "nats",
    "nats_per_token",
    "perplexity",
    "bits_per_token",
    "bits_per_byte",
    "bits_per_character",
    "word_perplexity",
    "protocol",
)
BUCKETS = ("from", "to", "tokens", "nats", "nats_per_token")

Scored = Mapping[str, Any]
"""The JSON object of one result."""


def write_evaluation(
    staged: StagedDirectory, content: Any, scored: Sequence[Scored], *, swept: Sequence[str] = ()
) -> list[str]:
    """Write the files; returns their names. `content`: of result.json. `swept`: option names.

    Files of an earlier evaluation in the same directory are replaced or removed.
    """
    # Imported here: matplotlib takes a second, and RESULT_NAME is needed before the scores.
    from txl_dist.reporting.evaluation_plot import plot_sweep, plot_table
    from txl_dist.reporting.figures import write_png

    with explain_disk_errors("writing the files of an evaluation", staged.directory):
        staging = staged.stage()
        write_synced(staging / SCORES_NAME, _csv(SCORES, scored))
        for name in TABLES if any("details" in each for each in scored) else ():
            rows = [
                {**each, **bucket} for each in scored for bucket in each["details"][f"by_{name}"]
            ]
            write_synced(staging / f"by_{name}.csv", _csv((*SETTINGS, *BUCKETS), rows))
            write_png(plot_table(name, scored), staging / f"by_{name}.png")
        if swept:
            write_png(plot_sweep(scored, swept), staging / SWEEP_PLOT_NAME)
        write_synced(
            staging / RESULT_NAME, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
        )
        names = sorted(path.name for path in staging.iterdir())
        for name in set(_all_names()) - set(names):
            (staged.directory / name).unlink(missing_ok=True)
        staged.publish(names)
    return names


def _all_names() -> list[str]:
    tables = [f"by_{name}.{suffix}" for name in TABLES for suffix in ("csv", "png")]
    return [RESULT_NAME, SCORES_NAME, SWEEP_PLOT_NAME, *tables]


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Columns that a row does not have are empty, and so are null values."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")
