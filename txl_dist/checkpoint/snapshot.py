"""Snapshot: a copy of one rank's slices and lane memories in host memory.

Training goes on while the copy is checked and written by a background thread. It needs memory for
the rank's share of the weights, optimizer states and lane memories; writing it needs no second
copy.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl_dist.checkpoint.fragments import Fragment
from txl_dist.checkpoint.manifest import Kind, PartSlice, RankPart, file_name, lane_key
from txl_dist.checkpoint.tensor_file import write_tensors
from txl_dist.errors import DivergedError


class Snapshot:
    """The tensors that one rank writes. Later changes of the originals do not affect it."""

    def __init__(
        self, fragments: Iterable[Fragment], memory_of_lanes: Iterable[tuple[int, Sequence[Tensor]]]
    ) -> None:
        """Copy the fragments, and of each lane its memory: a tensor [M, D] per layer."""
        self._slices: dict[str, PartSlice] = {}
        self._tensors: dict[Kind, dict[str, np.ndarray]] = {
            "weights": {},
            "optimizer": {},
            "memory": {},
        }
        lanes = []
        for lane, layers in memory_of_lanes:
            lanes.append(lane)
            self._tensors["memory"][lane_key(lane)] = _copy_all(layers)
        self._lanes = tuple(sorted(lanes))
        for each in fragments:
            self._slices[each.name] = PartSlice(
                shape=each.shape, start=each.start, stop=each.stop, states=tuple(each.states)
            )
            self._tensors["weights"][each.name] = _copy(each.master)
            for state, tensor in each.states.items():
                self._tensors["optimizer"][f"{each.name}/{state}"] = _copy(tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without the headers of files."""
        return sum(array.nbytes for kind in self._tensors.values() for array in kind.values())

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
        return RankPart(rank=rank, slices=self._slices, lanes=self._lanes, files=files)


def _is_finite(array: np.ndarray) -> bool:
    """Whether no element is NaN or infinite."""
    # Two calls without temporary arrays, and without the GIL: a call per block would interrupt the
    # training thread each time. NaN is the minimum and maximum of any numbers with it.
    return array.size == 0 or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _copy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()


def _copy_all(tensors: Sequence[Tensor]) -> np.ndarray:
    """Tensors of one shape, stacked; in fp32, in which bf16 is exact."""
    stacked = torch.empty(len(tensors), *tensors[0].shape)
    for target, tensor in zip(stacked, tensors, strict=True):
        target.copy_(tensor)
    return stacked.numpy()
