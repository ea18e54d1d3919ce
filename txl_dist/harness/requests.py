"""Requests as token ids, and the units of work in which workers process them.

A unit is a batch of requests of similar length. How requests are divided into units depends on them
and on the batch size, not on the number of workers, which therefore cannot change a result.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from txl_dist.checkpoint.reader import Weights
from txl_dist.config.run_config import Precision
from txl_dist.generation.options import Sampling, TextLimits

R = TypeVar("R", "ScoringRequest", "GenerationRequest")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Which model a worker opens, and how it reads."""

    checkpoint: Path
    weights: Weights
    tgt_len: int
    mem_len: int
    precision: Precision
    device: str | None
    """As the harness names it; None: a GPU if the worker has one."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Score `continuation` after `context`, which has at least one token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    wants_greedy: bool = True
    """Whether the answer must say if greedy decoding gives the continuation."""

    def __len__(self) -> int:
        return len(self.context) + len(self.continuation)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Continue `prompt`, with its own random generator."""

    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling
    limits: TextLimits

    def __len__(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True, slots=True)
class Unit(Generic[R]):
    """A batch of requests. `indices` are their places in the list of all requests."""

    source: ModelSource
    indices: tuple[int, ...]
    requests: tuple[R, ...]

    def __str__(self) -> str:
        return f"{len(self.indices)} harness requests, the first is number {self.indices[0]}"


def batches(source: ModelSource, requests: Sequence[R], *, batch_size: int) -> Iterator[Unit[R]]:
    """Units of at most `batch_size` requests, the longest first, so that little is padded."""
    by_length = sorted(range(len(requests)), key=lambda index: -len(requests[index]))
    for indices in _groups(by_length, requests, batch_size):
        yield Unit(source, indices, tuple(requests[index] for index in indices))


def _groups(
    order: Iterable[int], requests: Sequence[R], batch_size: int
) -> Iterator[tuple[int, ...]]:
    """Consecutive indices whose requests can be computed in one batch."""
    open_groups: dict[object, list[int]] = {}
    for index in order:
        request = requests[index]
        # A batch of generation has one kind of sampling and limits.
        key = (request.sampling, request.limits) if isinstance(request, GenerationRequest) else None
        group = open_groups.setdefault(key, [])
        group.append(index)
        if len(group) == batch_size:
            yield tuple(open_groups.pop(key))
    for group in open_groups.values():
        yield tuple(group)
