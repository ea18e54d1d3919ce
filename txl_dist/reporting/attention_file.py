"""attention.json: attention by distance of one model on one text, strict and complete.

`txl attention --out DIR` writes it beside the plots, and `--json` prints it. It is what
`txl report` embeds: whoever reads it needs neither the model nor the text again.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from data_pipeline.storage.remote_path import DatasetPath
from data_pipeline.storage.strict_model import StrictModel
from txl_dist.errors import DataError
from txl_dist.evaluation.evaluate import EvaluationSettings
from txl_dist.model.config import ModelConfig
from txl_dist.reporting.attention_by_distance import AttentionByDistance, Mass

ATTENTION_NAME = "attention.json"
MAX_BYTES = 256 * 2**20
MAX_ERROR = 1e-4
"""How far from 1 shares may add up to: weights are float32, or less."""

Share = Annotated[float, Field(ge=0, le=1 + MAX_ERROR)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class StoredMass(StrictModel):
    """Shares of a head's attention, for every layer and, in it, every head."""

    by_distance: tuple[tuple[tuple[Share, ...], ...], ...]
    """At each of `distances`."""
    memory: tuple[tuple[Share, ...], ...]
    segment: tuple[tuple[Share, ...], ...]
    mean_distance: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...]
    """In tokens."""

    @classmethod
    def of(cls, mass: Mass) -> Self:
        return cls(
            by_distance=_nested(mass.by_distance_LHD),
            memory=_nested(mass.memory_LH),
            segment=_nested(mass.segment_LH),
            mean_distance=_nested(mass.mean_distance),
        )

    def check(self, *, shape: tuple[int, int, int]) -> None:
        """Raises ValueError unless every head is there and all its shares add up to 1."""
        for name, rows in (("memory", self.memory), ("by_distance", self.by_distance)):
            widths = [len(row) for row in rows]
            if widths != [shape[1]] * shape[0]:
                raise ValueError(f"{name} has {widths} heads a layer, not {shape[0]} x {shape[1]}")
        for name in ("segment", "mean_distance"):
            if list(map(len, getattr(self, name))) != list(map(len, self.memory)):
                raise ValueError(f"{name} and memory are not of the same heads")
        for layer, rows in enumerate(self.by_distance):
            for head, row in enumerate(rows):
                if len(row) != shape[2]:
                    raise ValueError(f"layer {layer}, head {head}: {len(row)} of {shape[2]} shares")
                places = self.memory[layer][head] + self.segment[layer][head]
                if max(abs(sum(row) - 1), abs(places - 1)) > MAX_ERROR:
                    raise ValueError(f"layer {layer}, head {head}: shares do not add up to 1")

    @property
    def tensors(self) -> Mass:
        return Mass(
            by_distance_LHD=torch.tensor(self.by_distance, dtype=torch.float64),
            memory_LH=torch.tensor(self.memory, dtype=torch.float64),
            segment_LH=torch.tensor(self.segment, dtype=torch.float64),
        )


class AttentionFile(StrictModel):
    """What attention.json holds."""

    format: Literal["txl-attention"] = "txl-attention"
    version: Literal[1] = 1
    checkpoint: str
    data: str
    model: ModelConfig
    """With the memory options it was read with."""
    settings: EvaluationSettings
    num_queries: Annotated[Count, Field(ge=1)]
    distances: tuple[Count, ...]
    """0, 1, ... up to mem_len + tgt_len - 1, in tokens."""
    heads: StoredMass
    even: StoredMass
    """One layer, one head: had every query taken the same of each key it may see."""

    @classmethod
    def of(
        cls,
        attention: AttentionByDistance,
        *,
        checkpoint: Path,
        data: DatasetPath,
        model: ModelConfig,
        settings: EvaluationSettings,
    ) -> Self:
        return cls(
            checkpoint=_text(checkpoint),
            data=_text(data),
            model=model,
            settings=settings,
            num_queries=attention.num_queries,
            distances=tuple(range(attention.heads.by_distance_LHD.shape[-1])),
            heads=StoredMass.of(attention.heads),
            even=StoredMass.of(attention.even),
        )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        num_distances = self.settings.mem_len + self.settings.tgt_len
        if self.distances != tuple(range(num_distances)):
            raise ValueError(f"distances must be 0 up to {num_distances - 1}")
        self.heads.check(shape=(self.model.n_layer, self.model.n_head, num_distances))
        self.even.check(shape=(1, 1, num_distances))
        return self

    @property
    def attention(self) -> AttentionByDistance:
        """The numbers as tensors again."""
        return AttentionByDistance(
            heads=self.heads.tensors,
            even=self.even.tensors,
            num_queries=self.num_queries,
            tgt_len=self.settings.tgt_len,
        )


def load_attention(path: Path) -> AttentionFile:
    """Raises DataError naming what is damaged."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path} is larger than {MAX_BYTES:,} bytes: no {ATTENTION_NAME}")
        return AttentionFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path}{f', {where}' if where else ''}: {first['msg']}. It is damaged, edited, or of "
            "another version of txl; write it again: txl attention CHECKPOINT DATA --out "
            f"{path.parent}"
        ) from None


def _nested(tensor: Tensor) -> tuple:
    """Nested tuples, as strict validation wants them."""
    return tuple(map(_nested, tensor)) if tensor.dim() > 1 else tuple(tensor.tolist())


def _text(path: DatasetPath) -> str:
    """A path as valid text: bytes of another encoding are written as escapes."""
    return str(path).encode("utf-8", "backslashreplace").decode()
