"""attention.json: the attention by distance of one model on one text.

`txl attention --out DIR` writes it next to the plots, and `--json` prints the same object. It is an
output only: no code of this project reads it back. Its keys, where L is the number of layers, H of
heads, and D = mem_len + tgt_len of distances:

    format, version    "txl-attention", 1
    checkpoint, data   paths or URLs
    model, settings    options of the model and of this reading, as in ModelConfig and txl eval
    num_queries        number of queries that were averaged
    distances          0, 1, ..., D - 1, in tokens
    heads, even        by_distance [L, H, D], memory [L, H], segment [L, H]: shares of 1;
                       mean_distance [L, H]: in tokens. `even` has L = H = 1.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.system.remote_path import DatasetPath
from txl_dist.evaluation.evaluate import EvaluationJob
from txl_dist.model.config import ModelConfig
from txl_dist.reporting.attention_by_distance import AttentionByDistance, Mass

ATTENTION_NAME = "attention.json"


def attention_json(attention: AttentionByDistance, job: EvaluationJob, model: ModelConfig) -> str:
    """The text of attention.json."""
    content = {
        "format": "txl-attention",
        "version": 1,
        "checkpoint": as_utf8(job.checkpoint),
        "data": as_utf8(job.data),
        "model": asdict(model),
        "settings": asdict(job.settings),
        "num_queries": attention.num_queries,
        "distances": list(range(attention.heads.by_distance_LHD.shape[-1])),
        "heads": _mass(attention.heads),
        "even": _mass(attention.even),
    }
    return json.dumps(content, allow_nan=False)


def _mass(mass: Mass) -> dict[str, Any]:
    return {
        "by_distance": mass.by_distance_LHD.tolist(),
        "memory": mass.memory_LH.tolist(),
        "segment": mass.segment_LH.tolist(),
        "mean_distance": mass.mean_distance.tolist(),
    }


def as_utf8(path: Path | DatasetPath | str) -> str:
    """A path as valid text: bytes that are not UTF-8 become escapes such as \\xff."""
    return str(path).encode("utf-8", "backslashreplace").decode()
