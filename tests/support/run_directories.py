"""A run directory with everything that `txl report` shows, written without training."""

import json
from pathlib import Path
from typing import Any

from txl_dist.evaluation.breakdown import TABLES
from txl_dist.evaluation.result import EvaluationResult
from txl_dist.events import EVENTS, AttemptStart, EventLog, Kind

NUM_STEPS = 7


def start(step: int, *, num_steps: int = NUM_STEPS, **facts: Any) -> dict[str, Any]:
    reached_step, seconds = facts.pop("reached_step", 0), facts.pop("process_seconds", 0.0)
    about = AttemptStart(
        host="a", num_steps=num_steps, num_parameters=12_345, num_ranks=2, device="cpu",
        computation="ZeRO stage 1 | fp32", machine="a CPU, 2 cores", process_seconds=seconds,
    )  # fmt: skip
    text = f"resuming at step {step} from x" if step else "a new run"
    return {
        "kind": "start",
        "text": text,
        "step": step,
        "reached_step": reached_step,
        "start": about,
    }


def event(kind: Kind, text: str = "", **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "text": text or kind, **fields}


def write_events(run: Path, *events: dict[str, Any], attempt: int = 1) -> None:
    log = EventLog(run / EVENTS, lambda: attempt)
    for each in events:
        log.write(**each)


def write_run(path: Path, *, mem_len: int = 8) -> Path:
    """A run of NUM_STEPS steps that was restarted at step 3 and diverged at step 5."""
    (path / "logs").mkdir(parents=True)
    lines = []
    for step in range(1, NUM_STEPS + 1):
        values = {"loss": 5.0 - step / 10, "lr": 1e-3, "gradient_norm": 1.0, "goodput": 0.5}
        lines.append({"step": step, "tokens": 15 * step, "time": 1e9 + step, **values})
        if step in (3, 6):
            lines.append({**lines[-1], "valid/loss": 4.5 - step / 100, "valid/perplexity": 80.0})
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    lost = event("error", "</pre><script>alert(1)</script>", rank=1)
    saved = event("save", step=3, seconds={"steps": 2.0})
    write_events(path, start(0), event("first_batch"), saved, lost)
    seconds = {"steps": 5.0, "start-up": 1.0, "evaluation": 1.0}  # ended after the last step line
    diverged = event("divergence", "step 5 has diverged: the loss is nan", step=5)
    end = event("finished", "finished at step 7", step=NUM_STEPS, seconds=seconds)
    write_events(path, start(3, reached_step=4), event("first_batch"), diverged, end, attempt=2)
    (path / "config.yaml").write_text(
        f"directory: runs/<b>bold</b>\ndata:\n  path: missing/data\nmodel:\n  mem_len: {mem_len}\n"
        "  memory: recurrent\ntraining:\n  num_steps: 7\n"
    )
    return path


def evaluation(run: str, mem_len: int, nats: float, *, details: bool = False) -> dict[str, Any]:
    """A result of `txl eval`, as in its JSON."""
    tables = {f"by_{name}": [bucket(low, nats) for low in range(9)] for name in TABLES}
    about = {"interval": None, "num_documents": 9, "token_frequency_counted_on": "train"}
    content = {
        "checkpoint": f"runs/{run}/checkpoints/step-00000007",
        "split": "test", "mode": "exact", "tgt_len": 4, "mem_len": mem_len,
        "weights": "last", "precision": "fp32", "tokens_scored": 1234,
        "scores": {"nats_per_token": nats, "perplexity": 12.5, "bits_per_byte": 1.25},
        "data_sha256": "d", "model_sha256": run, "protocol": "the protocol line",
        **({"details": {**about, **tables}} if details else {}),
    }  # fmt: skip
    return EvaluationResult.model_validate(content).to_json()


def bucket(low: int, nats: float) -> dict[str, Any]:
    mean = nats + 1 / (1 + low)
    return {"from": low, "to": low, "tokens": 2, "nats": 2 * mean, "nats_per_token": mean}


def write_results(run: Path) -> None:
    """What `txl eval --sweep mem_len=0,4,8 --details` keeps in a run."""
    folder = run / "evaluations"
    folder.mkdir()
    for mem_len in (0, 4, 8):
        result = evaluation(run.name, mem_len, 3 - mem_len / 10, details=True)
        (folder / f"test-{mem_len}.json").write_text(json.dumps(result))
