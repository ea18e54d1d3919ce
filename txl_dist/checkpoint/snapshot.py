"""Snapshot: a copy of one rank's slices and lane memories in host RAM, and its files.

A background thread checks and writes the copy while training continues. It needs RAM for the rank's
share of the weights, optimizer states and lane memories; writing it needs no second copy. The
engine knows which slices a rank owns; it passes them as `Fragment`.

`safetensors.numpy.save_file` builds the content of the whole file in RAM before it writes, which
would double the RAM of a save. So `write_tensors` writes block by block: 8 bytes with the length of
the header (little-endian), the header (JSON: dtype, shape and byte range of each tensor), then the
tensors. Files are equal, byte by byte, to those of the library, which reads them.

Source: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl_dist.checkpoint.manifest import (
    FileEntry,
    Kind,
    RankPart,
    Slice,
    file_name,
    lane_key,
)
from txl_dist.errors import DivergedError

AVERAGE = "average"
"""Name of the average of the weights over steps, kept like a state of the optimizer."""
BLOCK_BYTES = 8 * 2**20
_ALIGNMENT = 8
"""The header is padded with spaces, so that the tensors are aligned in a memory map."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, stop) of a flattened parameter, as 1-D views that may be written to."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    master: Tensor
    """fp32 weights."""
    states: dict[str, Tensor]
    """The optimizer's states of this parameter, by name."""

    @property
    def stop(self) -> int:
        return self.start + self.master.numel()


class Snapshot:
    """The tensors that one rank writes. Later changes of the originals do not affect it."""

    def __init__(
        self,
        fragments: Iterable[Fragment],
        memory_of_lanes: Iterable[tuple[int, Mapping[str, Tensor]]],
    ) -> None:
        """Copy the fragments, and the memory of each lane: tensors by name."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._states: set[str] = set()
        self._tensors: dict[Kind, dict[str, np.ndarray]] = {
            "weights": {},
            "optimizer": {},
            "memory": {},
        }
        lanes = []
        for lane, tensors in memory_of_lanes:
            lanes.append(lane)
            for name, tensor in tensors.items():
                self._tensors["memory"][lane_key(lane) + name] = _copy(tensor)
        self._lanes = tuple(sorted(lanes))
        for each in fragments:
            self._shapes[each.name] = each.shape
            self._spans[each.name] = each.start, each.stop
            self._states |= each.states.keys()
            self._tensors["weights"][each.name] = _copy(each.master)
            for state, tensor in each.states.items():
                self._tensors["optimizer"][f"{each.name}/{state}"] = _copy(tensor)

    def require_finite(self, *, step: int, rank: int) -> None:
        """Raises DivergedError naming the tensors that contain a NaN or an infinity."""
        bad = [
            f"{kind} {name} (rank {rank})"
            for kind, arrays in self._tensors.items()
            for name, array in arrays.items()
            if not _is_finite(array)
        ]
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise DivergedError(
                f"after step {step} not all numbers are finite in {', '.join(bad[:3])}{more}: "
                "the update was too large, so no checkpoint is written"
            )

    def write(self, directory: Path, *, rank: int, before_block: Callable[[], None]) -> RankPart:
        """Write and sync this rank's files; see `write_tensors` for `before_block`."""
        files = {}
        for kind, arrays in self._tensors.items():
            path = directory / file_name(kind, rank)
            files[path.name] = write_tensors(path, arrays, before_block=before_block)
        return RankPart(
            rank=rank,
            shapes=self._shapes,
            slices={
                name: Slice(rank=rank, start=start, stop=stop)
                for name, (start, stop) in self._spans.items()
            },
            states=tuple(self._states),
            lanes=self._lanes,
            files=files,
        )


def _is_finite(array: np.ndarray) -> bool:
    """Whether no element is NaN or infinite."""
    # Two calls without temporary arrays, and without the GIL: a call per block would interrupt the
    # training thread each time. NaN is the minimum and maximum of any numbers with it.
    return array.size == 0 or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _copy(tensor: Tensor) -> np.ndarray:
    """In fp32, in which bf16 is exact."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()


def write_tensors(
    path: Path, arrays: Mapping[str, np.ndarray], *, before_block: Callable[[], None] = lambda: None
) -> FileEntry:
    """Write and sync the fp32 `arrays`; returns the file's entry for the manifest.

    Calls `before_block` before each block of a tensor; an exception it raises ends the writing. The
    file is not atomic: write it into a staging directory.
    """
    sha256 = hashlib.sha256()
    with path.open("wb") as file:
        for block in _blocks(arrays):
            before_block()
            file.write(block)
            sha256.update(block)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=path.stat().st_size, sha256=sha256.hexdigest())


def _blocks(arrays: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    names = sorted(arrays)
    yield _header({name: arrays[name] for name in names})
    for name in names:
        if arrays[name].dtype != np.float32:
            raise TypeError(f"{name} has dtype {arrays[name].dtype}, expected float32")
        data = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


def _header(arrays: Mapping[str, np.ndarray]) -> bytes:
    entries, offset = {}, 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        entries[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
