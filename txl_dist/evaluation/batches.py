"""Batches of chunks: those of a planned spec, how a worker scores one, and the sums of all.

The sums of finished batches are in a file for `txl eval --resume`:

    DIR/<split>-<first 16 digits of the key>.jsonl
    {"evaluation": {...}}                                          what is scored, for people
    {"batch": 3, "scores": {"sums": [[nats, tokens, bytes], ...], ...}, "checksum": "..."}
                                                                   one line per batch: BatchScores
    DIR/<split>-<first 16 digits of the key>.json                  the result, for `txl report`

The key is a digest of everything that determines the sums to the last bit: weights, dataset,
settings, chunks, batch size and code. It is part of every checksum, so a line of another evaluation
is never used. A line with a wrong checksum is reported and its batch is scored again; the last line
may be cut, by a kill. JSON keeps every digit of a float64.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.files import write_file
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict_json import canonical_json, sha256_of
from data_pipeline.system.workers import Progress
from txl_dist.checkpoint.directory import model_name
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.breakdown import (
    Breakdown,
    BreakdownCounter,
    breakdown_from_json,
    breakdown_to_json,
    count_tokens,
    details_to_json,
    log_bucket,
    total_breakdown,
)
from txl_dist.evaluation.result import EvaluationResult, ScoredText, named, protocol_line
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.scoring import EvaluationChunk, Scorer, overhead
from txl_dist.evaluation.spec import EvaluationSpec, context_tokens
from txl_dist.model.config import ModelConfig
from txl_dist.runtime.device import torch_threads
from txl_dist.runtime.fault_injection import fault_point

# Shapes: V vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchScores:
    """The sums of each chunk of a batch, in the order of the chunks."""

    sums: list[LossSums]
    kernel: str = ""
    """The attention function and the device that computed them."""
    breakdown: Breakdown | None = None
    """None if neither details nor documents are wanted."""


class FinishedScores:
    """The finished batches of one evaluation. Only one process may write the file."""

    def __init__(
        self, path: Path | None, *, key: str, description: Mapping[str, Any], resume: bool
    ) -> None:
        """With `resume`, reads the batches that an earlier process finished. None: keep no file."""
        self.path, self.is_resumed = path, resume
        self._key, self._description = key, description
        self.batches: dict[int, BatchScores] = {}
        self._is_begun = False
        if resume and path is not None and path.exists():
            self._read(path)

    def add(self, number: int, scores: BatchScores) -> None:
        """Keep the scores of a batch in the file, if there is one."""
        self.batches[number] = scores
        if self.path is None:
            return
        if self._is_begun:
            self._write(self.path, [self._line(number, scores)], append=True)
            return
        # Without the damaged lines of an earlier process.
        header = canonical_json({"evaluation": dict(self._description)}).encode() + b"\n"
        self._write(
            self.path, [header, *(self._line(*each) for each in sorted(self.batches.items()))]
        )
        self._is_begun = True

    def write_result(self, result: EvaluationResult) -> None:
        """Keep the result of all batches next to their sums."""
        if self.path is not None:
            content = json.dumps(result.to_json(), indent=1, allow_nan=False).encode() + b"\n"
            self._write(self.path.with_suffix(".json"), [content])

    def _write(self, path: Path, lines: Sequence[bytes], *, append: bool = False) -> None:
        """A failure is only a warning; nothing more is kept then."""
        try:
            if append:
                with path.open("ab") as file:
                    file.writelines(lines)
                    file.flush()
                    os.fsync(file.fileno())
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, lines)
        except OSError as error:
            log.warning(
                f"{path} cannot be written ({error.strerror}): if this evaluation is stopped, it "
                "starts again. Give another directory with --out DIR"
            )
            self.path = None

    def _line(self, number: int, scores: BatchScores) -> bytes:
        content = {
            "sums": [[each.nats, each.num_tokens, each.num_bytes] for each in scores.sums],
            "kernel": scores.kernel,
            "breakdown": scores.breakdown and breakdown_to_json(scores.breakdown),
        }
        checksum = sha256_of([self._key, number, content])
        entry = {"batch": number, "scores": content, "checksum": checksum}
        return canonical_json(entry).encode() + b"\n"

    def _read(self, path: Path) -> None:
        complete, _, _cut_by_a_kill = path.read_bytes().rpartition(b"\n")
        damaged = []
        for line_number, line in enumerate(complete.split(b"\n")[1:], start=2):
            try:
                self._add_line(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged.append(line_number)
        if damaged:
            log.warning(
                f"{path} is damaged or of another evaluation in {len(damaged)} lines (the first is "
                f"line {damaged[0]}): their chunks are scored again"
            )

    def _add_line(self, line: bytes) -> None:
        entry = json.loads(line)
        number, content = entry["batch"], entry["scores"]
        if entry["checksum"] != sha256_of([self._key, number, content]):
            raise ValueError("wrong checksum")
        breakdown = content["breakdown"]
        self.batches[number] = BatchScores(
            sums=[LossSums(*row) for row in content["sums"]],
            kernel=content["kernel"],
            breakdown=breakdown and breakdown_from_json(breakdown),
        )


@dataclass(frozen=True, slots=True)
class ScoringTask:
    """One batch of chunks of one spec."""

    spec: EvaluationSpec
    spec_number: int
    batch_number: int
    chunk_numbers: range
    chunks: tuple[EvaluationChunk, ...]
    frequency_bucket_V: NDArray[np.uint8] | None = None
    """Bucket of the frequency of each token id; None: without details."""
    per_document: bool = False
    """Whether the sums of documents are wanted, without the other details."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are read, with the contexts."""
        return sum(chunk.stop - chunk.context_start for chunk in self.chunks)

    def __str__(self) -> str:
        first, last = self.chunk_numbers[0], self.chunk_numbers[-1]
        return (
            f"chunks {first} to {last} of split {self.spec.settings.split}, "
            f"{self.spec.checkpoint.name}"
        )


def score_batch(task: ScoringTask) -> BatchScores:
    """Score one batch on a worker, which keeps model and split for its next batch.

    Raises CheckpointError if the score of a chunk is NaN or Inf.
    """
    fault_point("score")
    scorer, counter = open_scorer(task.spec), None
    if task.per_document or task.frequency_bucket_V is not None:
        counter = BreakdownCounter(
            frequency_bucket_V=task.frequency_bucket_V, byte_counts_V=scorer.byte_counts_V
        )
    with torch_threads(task.spec.num_threads):
        sums = list(scorer.scores(task.chunks, counter=counter))
    for number, chunk in zip(task.chunk_numbers, sums, strict=True):
        if not math.isfinite(chunk.nats):
            raise CheckpointError(
                f"chunk {number} of split {task.spec.settings.split}, {task.spec.checkpoint}: the "
                f"sum of its losses is {chunk.nats}, although all weights are finite, so the model "
                "overflows on this text. Try --precision fp32, or an earlier checkpoint: txl "
                "checkpoint list RUN"
            )
    return BatchScores(sums, scorer.kernel, counter.breakdown() if counter else None)


_opened: dict[EvaluationSpec, Scorer] = {}
"""The model and split of the last spec, at most one."""


def open_scorer(spec: EvaluationSpec) -> Scorer:
    """Load model and split of a spec, unless they are those of the last one."""
    if spec not in _opened:
        _opened.clear()  # free this model before the next one is loaded
        _opened[spec] = spec.open()
    return _opened[spec]


def close_scorer() -> None:
    """Free the model that this process keeps."""
    _opened.clear()


@dataclass(frozen=True, slots=True, eq=False)
class PlannedEvaluation:
    """A spec, its chunks, and the batches that are finished."""

    spec: EvaluationSpec
    chunks: list[EvaluationChunk]
    finished: FinishedScores
    text: ScoredText
    data_digest: str
    given: EvaluationSpec
    """The spec as it was given, whose paths may be relative."""
    trained: ModelConfig
    counted_split: str | None
    """The split whose token frequencies are used for the details; None: without details."""
    per_document: bool = False
    """Whether the finished batches have the sums of their documents, which details have too."""

    def batches(self) -> Iterator[range]:
        """The numbers of the chunks of every batch."""
        for rank in range(self.spec.num_ranks):
            numbers = range(rank, len(self.chunks), self.spec.num_ranks)
            for first in range(0, len(numbers), self.spec.batch_chunks):
                yield numbers[first : first + self.spec.batch_chunks]

    @property
    def sums(self) -> LossSums:
        """The sums of all batches, added in the order of the chunks."""
        numbers_of = list(self.batches())
        sums_of = {
            chunk_number: sums
            for number, scores in self.finished.batches.items()
            for chunk_number, sums in zip(numbers_of[number], scores.sums, strict=True)
        }
        return self.text.counted(sum((sums_of[chunk] for chunk in sorted(sums_of)), LossSums()))

    @property
    def breakdown(self) -> Breakdown | None:
        """That of all batches; None if neither details nor documents are wanted."""
        batches = sorted(self.finished.batches.items())
        parts = [scores.breakdown for _, scores in batches if scores.breakdown is not None]
        return total_breakdown(parts) if parts else None

    def result(self) -> EvaluationResult:
        settings, sums = self.spec.settings, self.sums
        protocol = protocol_line(
            settings,
            num_tokens=sums.num_tokens,
            unknown_targets=self.text.unknown_targets,
            data=named(self.spec.data.name, self.data_digest),
            model=named(model_name(self.spec.checkpoint), self.spec.digest),
            memory=self.trained.memory,
            weights=self.spec.weights,
            kernels={scores.kernel for scores in self.finished.batches.values()},
            definition_of_a_word=self.text.definition_of_a_word,
        )
        content = {
            **self.text.content(sums),
            **asdict(settings),
            "checkpoint": str(self.given.checkpoint),
            "data": str(self.given.data),
            "memory": self.trained.memory,
            "context_tokens": context_tokens(settings, self.trained),
            "num_chunks": len(self.chunks),
            "context_overhead": overhead(self.chunks),
            "data_sha256": self.data_digest,
            "model_sha256": self.spec.digest,
            "protocol": protocol,
            "weights": self.spec.weights,
        }
        if self.counted_split and (breakdown := self.breakdown):
            content["details"] = details_to_json(breakdown, self.counted_split)
        return EvaluationResult.model_validate(content)


def scoring_tasks(
    planned: Sequence[PlannedEvaluation], progress: Progress
) -> Iterator[ScoringTask]:
    """The unfinished batches, spec after spec, so that workers rarely change their model."""

    @cache
    def frequency_buckets(data: DatasetPath, split: str) -> NDArray[np.uint8]:
        return log_bucket(count_tokens(open_split(data, split), progress=progress)).astype(np.uint8)

    for spec_number, each in enumerate(planned):
        split = each.counted_split
        for batch_number, numbers in enumerate(each.batches()):
            if batch_number not in each.finished.batches:
                yield ScoringTask(
                    spec=each.spec,
                    spec_number=spec_number,
                    batch_number=batch_number,
                    chunk_numbers=numbers,
                    chunks=tuple(each.chunks[number] for number in numbers),
                    frequency_bucket_V=frequency_buckets(each.spec.data, split) if split else None,
                    per_document=each.per_document,
                )
