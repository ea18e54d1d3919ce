"""Checkpoint directories that only have a manifest, with the entries that tracking reads."""

import json
from pathlib import Path


def write_manifest(run_dir: Path, step: int, *, save_id: str | None = None) -> Path:
    """RUN/checkpoints/step-N; `save_id` is made from the step by default."""
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "digest": f"{step:064x}",
        "save_id": save_id or f"{step:032x}",
        "state": {"step": step, "tokens": step * 10},
        "model": {"n_layer": 2, "mem_len": 64},
        "data_digest": "e" * 64,
        "written_by": "tests",
    }
    (path / "manifest.json").write_text(json.dumps(content))
    return path


def point_to(run_dir: Path, name: str, step: int) -> None:
    """Write RUN/LATEST or RUN/BEST."""
    (run_dir / name).write_text(f"checkpoints/step-{step:08d}\n")
