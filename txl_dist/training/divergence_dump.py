"""RUN/events: what the lanes of each rank read in a step that has diverged.

    RUN/events/divergence-step-NNNNNNNN-rank-R.json

One file per event and rank: the loss of each lane, and the documents of its segment (also of
lanes with an ordinary loss: compare them). Written only at an event, so normal steps cost nothing.
"""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.streams.documents import LaneDocument, documents_of_lanes
from data_pipeline.streams.segments import Segment
from data_pipeline.system.files import write_file
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import TxlError
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.training.data import TrainingData
from txl_dist.training.state import Phase, TrainState
from txl_dist.training.step import StepResult

MAX_FILES = 100
"""Files of each rank that are kept; the oldest are removed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DivergenceDump:
    """Writes the files of one rank. Never raises for a disk or data that cannot be used."""

    directory: Path
    """RUN/events."""
    rank: int
    lanes: Sequence[int]
    """Lanes of this rank."""
    data: TrainingData
    config: RunConfig

    def write(self, state: TrainState, segment: Segment, result: StepResult) -> str:
        """Write the file of the step after `state`; returns the name for all ranks' files."""
        stem = f"divergence-step-{state.step + 1:08d}-rank-"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            content = json.dumps(self._content(state, segment, result), indent=1)
            write_file(self.directory / f"{stem}{self.rank}.json", content.encode() + b"\n")
            for path in self._own_files()[:-MAX_FILES]:
                path.unlink()
        except OSError as error:
            log.warning("%s cannot be written: %s", self.directory, error.strerror)
        return str(self.directory / f"{stem}*.json")

    def _content(self, state: TrainState, segment: Segment, result: StepResult) -> dict[str, Any]:
        sums, phase = result.sums, state.phases[-1]
        parts = self.data.plan_of(phase).epoch_ranges(segment.position, segment.next_position)
        content: dict[str, Any] = {
            "step": state.step + 1,
            "event": result.event,
            "position": segment.position,
            "epochs": [part._asdict() for part in parts],
            "loss": _mean(sums),
            "gradient_norm": _json(result.gradient_norm),
        }
        documents: list[LaneDocument] = []
        try:
            documents = self._documents(phase, segment)
        except (TxlError, OSError) as error:  # the event matters more than a list of documents
            content["documents_error"] = str(error)
        content["lanes"] = [
            {
                "lane": lane,
                "loss": _mean(lane_sums),
                "nats": _json(lane_sums.nats),
                "targets": lane_sums.num_tokens,
                "documents": [
                    {
                        "id": document.id,
                        "corpus": phase.corpora[document.corpus].name,
                        "epoch": document.epoch,
                        "position": document.position,
                        "num_tokens": document.num_tokens,
                    }
                    for document in documents
                    if document.lane == lane
                ],
            }
            for lane, lane_sums in result.lane_sums.items()
        ]
        return content

    def _documents(self, phase: Phase, segment: Segment) -> list[LaneDocument]:
        """The documents of this rank's lanes. Raises TxlError or OSError for damaged data."""
        return documents_of_lanes(
            self.data.source_of(phase, self.config),
            self.data.plan_of(phase),
            lanes=self.lanes,
            start=segment.position,
            stop=segment.next_position,
            shuffle=self.config.data.order,
            seed=self.config.seed,
        )

    def _own_files(self) -> list[Path]:
        """This rank's files, oldest step first."""
        return sorted(self.directory.glob(f"divergence-step-*-rank-{self.rank}.json"))


def _mean(sums: LossSums) -> float | str | None:
    """Nats per token; None for a segment of one token, which has no target."""
    return _json(sums.nats_per_token) if sums.num_tokens else None


def _json(value: float) -> float | str:
    """As in metrics.jsonl: JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
