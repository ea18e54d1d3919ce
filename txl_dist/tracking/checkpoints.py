"""The checkpoints of a run as `TrackedModel`s, read from its directory by the sender.

The directory is the record: checkpoints appear and disappear in it at once, so nothing else has to
be written by training. Which ones stay is decided by `checkpoint/directory.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import MANIFEST_NAME
from txl_dist.config.redaction import redact
from txl_dist.tracking.tracker import Point, TrackedDataset, TrackedModel, as_text


class CheckpointModels:
    """Reads the manifest of each checkpoint once."""

    def __init__(self, run_dir: Path) -> None:
        self._name = run_dir.resolve().name
        self._directory = CheckpointDirectory(run_dir)
        self._manifests: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def read(
        self, scores: Mapping[int, tuple[Point, ...]], scored_on: TrackedDataset | None
    ) -> tuple[TrackedModel, ...]:
        """The models of all complete checkpoints, by ascending step.

        `scores` by step. Raises OSError if the directory cannot be read.
        """
        pointers = self._directory.pointers_by_step()
        models, manifests = [], {}
        for step in self._directory.steps():
            path = self._directory.at(step)
            try:
                manifests[path] = self._manifest(path)
                model = self._model(path, manifests[path][1])
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                continue  # removed meanwhile, or damaged: it is no model
            tags = {
                f"txl.{name.lower()}": str(name in pointers.get(step, ())).lower()
                for name in ("LATEST", "BEST")
            }
            models.append(
                TrackedModel(
                    **{**model, "tags": {**model["tags"], **tags}},
                    scores=scores.get(step, ()),
                    scored_on=scored_on,
                )
            )
        self._manifests = manifests
        return tuple(models)

    def _manifest(self, path: Path) -> tuple[tuple[int, int], dict[str, Any]]:
        status = (path / MANIFEST_NAME).stat()
        version = status.st_ino, status.st_mtime_ns
        known = self._manifests.get(path)
        if known is not None and known[0] == version:
            return known
        # Not `load_checkpoint_manifest`, which checks every slice: this reads a few facts of it.
        manifest = json.loads((path / MANIFEST_NAME).read_bytes())
        return version, {
            name: manifest[name]
            for name in ("digest", "save_id", "state", "model", "data_digest", "written_by")
        }

    def _model(self, path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
        state, architecture = manifest["state"], manifest["model"]
        return {
            "key": str(manifest["save_id"]),
            "name": f"{self._name} step {state['step']}",
            "step": int(state["step"]),
            "params": {
                "step": str(state["step"]),
                "tokens": str(state.get("tokens")),
                "data_sha256": str(manifest["data_digest"]),
                "written_by": str(manifest["written_by"]),
                **{f"model.{name}": as_text(value) for name, value in architecture.items()},
            },
            "tags": {
                "txl.path": redact(str(path.resolve())),
                "txl.manifest_sha256": str(manifest["digest"]),
            },
        }
