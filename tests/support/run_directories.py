"""A run directory with everything that `txl report` shows, written without training."""

import json
from pathlib import Path
from typing import Any

from txl_dist.training.goodput import GoodputFile

NUM_STEPS = 7


def write_run(path: Path, *, mem_len: int = 8) -> Path:
    """A run of NUM_STEPS steps that was restarted at step 3 and diverged at step 5."""
    (path / "logs").mkdir(parents=True)
    (path / "events").mkdir()
    (path / "events" / "divergence-step-00000005-rank-0.json").write_text("{}")
    lines = []
    for step in range(1, NUM_STEPS + 1):
        values = {"loss": 5.0 - step / 10, "lr": 1e-3, "gradient_norm": 1.0, "goodput": 0.5}
        lines.append({"step": step, "tokens": 15 * step, "time": 1e9 + step, **values})
        if step in (3, 6):
            lines.append({**lines[-1], "valid/loss": 4.5 - step / 100, "valid/perplexity": 80.0})
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (path / "logs" / "metrics-superseded.jsonl").write_text('{"step": 4, "loss": 4.7}\n')
    seconds = {"steps": 6.0, "start-up": 3.0, "evaluation": 1.0}  # ended after the last step line
    goodput = GoodputFile(
        updated=1e9, step=NUM_STEPS, restarts=1, lost_steps=1, is_complete=True,
        seconds=seconds, productive={},
    )  # fmt: skip
    (path / "goodput.json").write_text(goodput.model_dump_json())
    (path / "config.yaml").write_text(
        f"directory: runs/<b>bold</b>\ndata:\n  path: missing/data\nmodel:\n  mem_len: {mem_len}\n"
        "  memory: recurrent\ntraining:\n  num_steps: 7\n"
    )
    (path / "logs" / "rank-0.log").write_text(
        "12:00:00 rank 0 is up\n12:00:00 machine | host a: a CPU, 2 cores\n"
        "12:00:00 step 1 | loss 4.9 | ppl 1\n12:00:01 </pre><script>alert(1)</script>\n"
        "12:00:02 rank 0 is up\n12:00:02 resuming at step 3 from x | 12,345 parameters | 1 ranks\n"
        "12:00:09 finished at step 7\n"
    )
    return path


def evaluation(run: str, mem_len: int, nats: float, *, details: bool = False) -> dict[str, Any]:
    """A result of `txl eval`, as in its JSON."""
    buckets = [{"from": low, "to": low, "nats_per_token": nats + 1 / (1 + low)} for low in range(9)]
    tables = {"by_document_position": buckets, "by_segment_position": buckets}
    return {
        "checkpoint": f"runs/{run}/checkpoints/step-00000007",
        "split": "test", "mode": "exact", "tgt_len": 4, "mem_len": mem_len, "clamp_len": None,
        "same_length": False, "weights": "last", "precision": "fp32", "tokens_scored": 1234,
        "nats_per_token": nats, "perplexity": 12.5, "bits_per_byte": 1.25,
        "word_perplexity": None, "data_sha256": "d", "model_sha256": run,
        "protocol": "the protocol line", **({"details": tables} if details else {}),
    }  # fmt: skip


def write_results(directory: Path, run: str) -> None:
    """result.json, recl.json and attention.json as the commands write them."""
    directory.mkdir(parents=True)
    swept = [evaluation(run, mem_len, 3 - mem_len / 10, details=True) for mem_len in (0, 4, 8)]
    (directory / "result.json").write_text(json.dumps({"candidates": swept, "reported": []}))
    curve = [{"context": c, "nats": 3 - c / 99, "low": 2, "high": 3} for c in (8, 16, 24)]
    recl = {"r": 0.1, "recl": 16, "low": 8, "high": 24, "is_lower_bound": True}
    models = [{"name": run, "curve": curve, "recl": [recl]}]
    about = {"group": "all models", "split": "test", "positions": 60, "protocol": "p"}
    (directory / "recl.json").write_text(json.dumps({**about, "models": models}))
    heads = {"by_distance": [[[0.5, 0.3, 0.2]], [[0.2, 0.3, 0.5]]], "memory": [[0.25], [0.5]]}
    even = {"by_distance": [[[0.3, 0.3, 0.4]]], "memory": [[0.5]]}
    settings = {"split": "test", "tgt_len": 1, "mem_len": 2}
    attention = {"checkpoint": "x", "settings": settings, "num_queries": 9}
    content = {**attention, "heads": heads, "even": even}
    (directory / "attention.json").write_text(json.dumps(content))
