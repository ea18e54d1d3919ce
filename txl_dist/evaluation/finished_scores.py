"""The sums of finished batches of an evaluation, in a file for `txl eval --resume`.

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
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.system.files import write_file
from data_pipeline.system.strict_json import canonical_json, sha256_of
from txl_dist.evaluation.breakdown import Breakdown, breakdown_from_json, breakdown_to_json
from txl_dist.evaluation.scores import LossSums

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
        """By number of the batch."""
        self._is_begun = False
        if resume and path is not None and path.exists():
            self._read(path)

    def add(self, number: int, scores: BatchScores) -> None:
        """Keep the scores of a batch in the file, if there is one. A failure is only a warning."""
        self.batches[number] = scores
        if self.path is None:
            return
        try:
            if self._is_begun:
                with self.path.open("ab") as file:
                    file.write(self._line(number, scores))
                    file.flush()
                    os.fsync(file.fileno())
            else:  # without the damaged lines of an earlier process
                lines = [canonical_json({"evaluation": dict(self._description)}).encode() + b"\n"]
                lines += [self._line(*each) for each in sorted(self.batches.items())]
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_file(self.path, lines)
                self._is_begun = True
        except OSError as error:
            log.warning(
                "%s cannot be written (%s): if this evaluation is stopped, it starts again. Give "
                "another directory with --scores DIR",
                self.path,
                error.strerror,
            )
            self.path = None

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Keep the result of all batches next to their sums. A failure is only a warning."""
        if self.path is None:
            return
        path = self.path.with_suffix(".json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(result, indent=1, allow_nan=False).encode() + b"\n")
        except OSError as error:
            log.warning("%s cannot be written (%s)", path, error.strerror)

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
        try:
            complete, _, _cut_by_a_kill = path.read_bytes().rpartition(b"\n")
        except OSError as error:
            log.warning("%s cannot be read (%s): it is not used", path, error.strerror)
            return
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
        breakdown = content["breakdown"]
        self.batches[number] = BatchScores(
            sums=[LossSums(*row) for row in content["sums"]],
            kernel=content["kernel"],
            breakdown=breakdown and breakdown_from_json(breakdown),
        )
