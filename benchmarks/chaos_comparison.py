"""Compares a run that was killed with one that was not, and draws both. Used by chaos.py."""

import hashlib
import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure

from data_pipeline.system.remote_path import RemotePath
from txl_dist.checkpoint.copies import CheckpointCopies
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import verify_checkpoint
from txl_dist.tracking.journal import read_metrics
from txl_dist.tracking.tracker import TrackingState, points_of

METRICS = ("tokens", "loss", "perplexity", "lr", "gradient_norm", "memory_valid", "valid/loss")
"""Metrics that do not depend on time."""
DELIVERY_SECONDS = 240.0


def compare(run: Path, reference: Path, *, url: str | None) -> dict[str, Any]:
    """What is equal: metrics, tensors of the last checkpoint and of its copy at `url`, and MLflow
    with metrics.jsonl. Lost disks are no exception: without its tracking.json a run gets a new
    MLflow run, which receives the whole journal."""
    lines, expected = metrics(run), metrics(reference)
    losses, expected_losses = losses_of(run), losses_of(reference)
    has_same_steps = losses.keys() == expected_losses.keys()
    result = {
        "metrics": lines == expected,
        "weights": weights_sha256(run) == weights_sha256(reference),
        "mlflow": mlflow_equals_journal(run),
    }
    if url is not None:
        result["copy"] = copy_sha256(url) == weights_sha256(reference)
    return {
        "run": run.name,
        "equal": all(result.values()),
        **result,
        "weights_sha256": weights_sha256(run),
        "largest_loss_difference": max(
            (abs(losses[step] - expected_losses[step]) for step in expected_losses), default=0.0
        )
        if has_same_steps
        else float("inf"),
    }


def metrics(run: Path) -> list[dict[str, float]]:
    """Every line of metrics.jsonl without what depends on time; lines twice are there twice."""
    lines = read_metrics(run / "metrics.jsonl")
    chosen = [{name: line[name] for name in ("step", *METRICS) if name in line} for line in lines]
    return sorted(chosen, key=lambda line: (line["step"], "loss" in line))


def losses_of(run: Path) -> dict[int, float]:
    return {int(line["step"]): line["loss"] for line in metrics(run) if "loss" in line}


def weights_sha256(run: Path) -> str:
    """One hash of all tensor files (weights, optimizer, memory) of the last checkpoint."""
    directory = CheckpointDirectory(run)
    manifest = verify_checkpoint(directory.at(directory.steps()[-1]))
    files = {name: entry.sha256 for name, entry in manifest.files.items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def copy_sha256(url: str) -> str:
    """`weights_sha256` of the newest copy, which is downloaded and verified."""
    remote = CheckpointCopies(RemotePath(url))
    with TemporaryDirectory() as path:
        directory = CheckpointDirectory(Path(path))
        directory.open()
        remote.download(remote.complete()[-1], directory)
        return weights_sha256(Path(path))


def mlflow_equals_journal(run: Path) -> bool:
    """Whether the MLflow run has every point of metrics.jsonl once, and no other."""
    deadline = time.monotonic() + DELIVERY_SECONDS
    # A sender may still deliver the rest, so look until they are equal.
    while not _is_delivered(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _is_delivered(run: Path) -> bool:
    state = TrackingState.load(run / "tracking.json")
    if state is None or (state.delivered, state.status) != (True, "finished"):
        return False
    with sqlite3.connect(run.parent / "mlflow.db") as database:
        query = "SELECT key, step, value FROM metrics WHERE run_uuid = ?"
        recorded = sorted(database.execute(query, (state.run_id,)))
    journal = [
        (point.metric, point.step, point.value)
        for line in read_metrics(run / "metrics.jsonl")
        for point in points_of(line)
    ]
    return recorded == sorted(journal)


def draw(
    reference: Path,
    runs: Sequence[Path],
    kills: Sequence[dict[str, Any]],
    phases: Sequence[str],
    out: Path,
) -> None:
    """Both curves, their difference, and the step and phase of every kill."""
    expected = losses_of(reference)
    steps = sorted(expected)
    figure = Figure(figsize=(9, 8), layout="constrained")
    curves, difference, marks = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 2))
    curves.plot(steps, [expected[s] for s in steps], lw=3, color="0.75", label="undisturbed")
    for number, run in enumerate(runs):
        losses = losses_of(run)
        label = f"killed and resumed ({len(runs)} runs)" if number == 0 else None
        curves.plot(steps, [losses[s] for s in steps], lw=0.6, color="tab:blue", label=label)
        difference.plot(steps, [losses[s] - expected[s] for s in steps], lw=0.8, color="tab:blue")
    curves.set_ylabel("loss, nats per token")
    curves.legend()
    difference.set_ylabel("difference")
    for name in dict.fromkeys(kill["victim"] for kill in kills):
        chosen = [kill for kill in kills if kill["victim"] == name]
        rows = [phases.index(kill["phase"]) for kill in chosen]
        marks.plot([k["step"] for k in chosen], rows, "|", ms=12, label=f"{name} ({len(chosen)})")
    counts = [sum(kill["phase"] == phase for kill in kills) for phase in phases]
    labels = [f"{phase} ({count})" for phase, count in zip(phases, counts, strict=True)]
    marks.set_yticks(range(len(phases)), labels)
    marks.set_title(f"{len(kills)} kills by phase and victim")
    marks.set_xlabel("step")
    marks.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.savefig(out, dpi=120)
