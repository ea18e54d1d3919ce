"""The sums of finished batches of an evaluation, in a file for `txl eval --resume`.

    DIR/<split>-<first 16 digits of the key>.jsonl
    {"evaluation": {...}}                                          what is scored, for people
    {"batch": 3, "scores": {"sums": [[nats, tokens, bytes], ...], ...}, "checksum": "..."}
                                                                   one line per batch: BatchScores

The key is a digest of everything that determines the sums to the last bit: weights, dataset,
settings, chunks, batch size and code. It is part of every checksum, so a line of another evaluation
is never used. A line with a wrong checksum is reported and its batch is scored again; the last line
may be cut, by a kill. JSON keeps every digit of a float64.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data_pipeline.system.files import write_file
from data_pipeline.system.strict_json import canonical_json, sha256_of
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.breakdown import LossBreakdown
from txl_dist.evaluation.scores import LossSums


class NonFiniteScoreError(CheckpointError):
    """The model overflows on this text, although its weights are finite."""


@dataclass(frozen=True, slots=True)
class BatchScores:
    """The sums of each chunk of a batch, in the order of the chunks."""

    sums: list[LossSums]
    kernel: str = ""
    """The attention function and the device that computed them."""
    breakdown: LossBreakdown | None = field(default=None, compare=False)
    """None if the details are not wanted."""

    def to_json(self) -> dict[str, Any]:
        """Keeps every digit."""
        content: dict[str, Any] = {
            "sums": [[each.nats, each.num_tokens, each.num_bytes] for each in self.sums],
            "kernel": self.kernel,
        }
        if self.breakdown is not None:
            content["breakdown"] = self.breakdown.to_json()
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError for content that `to_json` does not write."""
        breakdown = content.get("breakdown")
        return cls(
            sums=[LossSums(*row) for row in content["sums"]],
            kernel=content["kernel"],
            breakdown=None if breakdown is None else LossBreakdown.from_json(breakdown),
        )


log = logging.getLogger(__name__)


class FinishedScores:
    """The finished batches of one evaluation. Only one process may write the file."""

    def __init__(
        self, path: Path | None, *, key: str, description: Mapping[str, Any], resume: bool
    ) -> None:
        """With `resume`, reads the batches that an earlier process finished. None: keep no file."""
        self.path, self.is_resumed = path, resume
        self._key, self._description = key, description
        self.batches: dict[int, BatchScores] = {}
        """By number of the batch."""
        self._descriptor: int | None = None
        if resume and path is not None:
            self._read(path)

    def __enter__(self) -> Self:
        """Write the file without damaged lines, and keep it open. A failure is only a warning."""
        if self.path is None:
            return self
        lines = [canonical_json({"evaluation": dict(self._description)})]
        lines += [self._line(*each) for each in sorted(self.batches.items())]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, "".join(f"{line}\n" for line in lines).encode())
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._warn(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def add(self, number: int, scores: BatchScores) -> None:
        """Append the scores of a batch and sync the file."""
        self.batches[number] = scores
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, f"{self._line(number, scores)}\n".encode())
            os.fsync(self._descriptor)
        except OSError as error:
            self._warn(error)
            os.close(self._descriptor)
            self._descriptor = None

    def _warn(self, error: OSError) -> None:
        log.warning(
            "%s cannot be written (%s): if this evaluation is stopped, it starts again. Give "
            "another directory with --scores DIR",
            self.path,
            error.strerror,
        )

    def _line(self, number: int, scores: BatchScores) -> str:
        content = scores.to_json()
        checksum = sha256_of([self._key, number, content])
        return canonical_json({"batch": number, "scores": content, "checksum": checksum})

    def _read(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read (%s): it is not used", path, error.strerror)
            return
        complete, _, _cut_by_a_kill = content.rpartition(b"\n")
        damaged = []
        for line_number, line in enumerate(complete.split(b"\n")[1:], start=2):
            try:
                self._add_line(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged.append(line_number)
        if damaged:
            log.warning(
                "%s is damaged or of another evaluation in %d lines (the first is line %d): their "
                "chunks are scored again",
                path,
                len(damaged),
                damaged[0],
            )

    def _add_line(self, line: bytes) -> None:
        entry = json.loads(line)
        number, content = entry["batch"], entry["scores"]
        if entry["checksum"] != sha256_of([self._key, number, content]):
            raise ValueError("wrong checksum")
        self.batches[number] = BatchScores.from_json(content)
