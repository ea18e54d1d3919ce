"""The tensors of a checkpoint: copied and written by the rank that owns them, read by any rank.

    Snapshot        a copy of one rank's slices and lane memories in host RAM, and its files
    load_model, load_fragments, load_memory
                    verify files, and read any slice of any parameter

A background thread checks and writes the copy while training continues. It needs RAM for the rank's
share of the weights, optimizer states and lane memories; writing it needs no second copy. The
engine knows which slices a rank owns; it passes them as `Fragment`. Every rank reads only what it
needs. The number of ranks, the ZeRO stage and the micro-batch size may differ from the run that
wrote a checkpoint, because slices are located by parameter and range, and memory by lane.

`safetensors.numpy.save_file` builds the content of the whole file in RAM before it writes, which
would double the RAM of a save. So `write_tensors` writes block by block: 8 bytes with the length of
the header (little-endian), the header (JSON: dtype, shape and byte range of each tensor), then the
tensors. Files are equal, byte by byte, to those of the library, which reads them.

Source: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_pipeline.tokenizers import Tokenizer, load_tokenizer
from txl_dist.checkpoint.directory import find_damage, reading
from txl_dist.checkpoint.manifest import (
    TOKENIZER_NAME,
    CheckpointManifest,
    FileEntry,
    Kind,
    RankPart,
    Slice,
    file_name,
    lane_key,
    load_checkpoint_manifest,
)
from txl_dist.errors import CheckpointError, DivergedError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

AVERAGE = "average"
"""Name of the average of the weights over steps, kept like a state of the optimizer."""
BLOCK_BYTES = 8 * 2**20
_ALIGNMENT = 8
"""The header is padded with spaces, so that the tensors are aligned in a memory map."""
Weights = Literal["auto", "averaged", "last"]
"""Which weights to load: the average over steps, those of the last step, or the average if any."""


# --- writing --------------------------------------------------------------------------------------


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
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._states: set[str] = set()
        self._tensors: dict[Kind, dict[str, np.ndarray]] = {
            "weights": {},
            "optimizer": {},
            "memory": {},
        }
        self._lanes: list[int] = []
        for lane, tensors in memory_of_lanes:
            self._lanes.append(lane)
            for name, tensor in tensors.items():
                self._tensors["memory"][lane_key(lane) + name] = _copy(tensor)
        for each in fragments:
            self._shapes[each.name] = each.shape
            self._spans[each.name] = each.start, each.stop
            self._states |= each.states.keys()
            self._tensors["weights"][each.name] = _copy(each.master)
            for state, tensor in each.states.items():
                self._tensors["optimizer"][f"{each.name}/{state}"] = _copy(tensor)

    def require_finite(self, *, step: int, rank: int) -> None:
        """Raises DivergedError naming the tensors that contain a NaN or an infinity."""
        # Two calls without temporary arrays, and without the GIL: a call per block would interrupt
        # the training thread each time. NaN is the minimum and maximum of any numbers with it.
        bad = [
            f"{kind} {name} (rank {rank})"
            for kind, arrays in self._tensors.items()
            for name, array in arrays.items()
            if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max()))
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
            lanes=tuple(sorted(self._lanes)),
            files=files,
        )


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


# --- reading --------------------------------------------------------------------------------------


def verify_checkpoint(directory: Path, *, kinds: Sequence[str] = ()) -> CheckpointManifest:
    """Hash all files, or those whose name starts with one of `kinds`; returns the manifest.

    Raises CheckpointError listing every damaged file.
    """
    with reading(directory):
        manifest = load_checkpoint_manifest(directory)
        names = [name for name in manifest.files if not kinds or name.startswith(tuple(kinds))]
        damage = find_damage(directory, manifest, names)
    if damage:
        raise CheckpointError(
            f"{directory} is damaged: {'; '.join(damage)}. Use another checkpoint: "
            f"txl checkpoint list {directory.parent.parent}"
        )
    return manifest


def load_model(
    directory: Path, *, config: ModelConfig | None = None, weights: Weights = "auto"
) -> tuple[TransformerXL, Tokenizer, CheckpointManifest]:
    """The model in evaluation mode, on the CPU, with its tokenizer.

    `config` may differ from the saved one in fields that affect no weights (mem_len, clamp_len,
    same_length, attention). Verifies the weights first; raises CheckpointError, also if averaged
    weights are wanted and there are none.
    """
    with reading(directory):
        manifest = load_checkpoint_manifest(directory)
        averaged = chosen_weights(directory, manifest, weights) == "averaged"
        kinds = ("optimizer" if averaged else "weights", "tokenizer")
        manifest = verify_checkpoint(directory, kinds=kinds)
        model = TransformerXL(config or manifest.architecture)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        check_parameters(directory, manifest, shapes)
        slices, state = _Slices(directory, manifest), AVERAGE if averaged else None
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.view(-1).copy_(slices.range(name, 0, parameter.numel(), state))
        tokenizer = load_tokenizer(directory / TOKENIZER_NAME)
    return model.eval(), tokenizer, manifest


def chosen_weights(
    directory: Path, manifest: CheckpointManifest, weights: Weights
) -> Literal["averaged", "last"]:
    """The weights that `load_model` loads. Raises CheckpointError if there are none such."""
    has_average = AVERAGE in manifest.optimizer_states
    if weights == "averaged" and not has_average:
        raise CheckpointError(
            f"{directory} has no averaged weights: the run had optimizer.averaging=null. Leave "
            "`weights` out to use those of the last step"
        )
    return "averaged" if has_average and weights != "last" else "last"


def load_fragments(
    directory: Path, manifest: CheckpointManifest, fragments: Iterable[Fragment]
) -> None:
    """Copy weights and optimizer state into `fragments`, whichever ranks wrote them.

    The files must have been verified, also by `check_parameters`.
    """
    slices = _Slices(directory, manifest)
    with torch.no_grad():
        for fragment in fragments:
            span = (fragment.name, fragment.start, fragment.stop)
            fragment.master.copy_(slices.range(*span))
            for state, tensor in fragment.states.items():
                tensor.copy_(slices.range(*span, state))


def load_memory(
    directory: Path, manifest: CheckpointManifest, lanes: Iterable[int]
) -> dict[int, dict[str, Tensor]]:
    """Lane -> tensors of its memory by name, for the given lanes."""
    slices = _Slices(directory, manifest)
    return {lane: slices.memory(lane) for lane in lanes}


def check_parameters(
    directory: Path, manifest: CheckpointManifest, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError naming the parameters whose shapes differ from `expected`."""
    saved = {name: entry.shape for name, entry in manifest.parameters.items()}
    differing = [
        f"{name}: checkpoint {saved.get(name, 'none')}, model {expected.get(name, 'none')}"
        for name in sorted(expected.keys() | saved.keys())
        if expected.get(name) != saved.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{directory} is a checkpoint of another model: {'; '.join(differing[:8])}"
            f"{f' and {len(differing) - 8} more' if len(differing) > 8 else ''}. Start a new run, "
            "or restore the model's options from RUN/config.yaml"
        )


class _Slices:
    """Reads ranges of parameters, and memories of lanes, from a checkpoint's files."""

    def __init__(self, directory: Path, manifest: CheckpointManifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._open: dict[str, safe_open] = {}

    def range(self, name: str, start: int, stop: int, state: str | None = None) -> Tensor:
        """Elements [start, stop) of a flattened parameter, or of a state of it; fp32."""
        kind: Kind = "optimizer" if state else "weights"
        key = f"{name}/{state}" if state else name
        parts = []
        for part in self._manifest.parameters[name].slices:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                file = self._file(file_name(kind, part.rank))
                # get_slice reads only these bytes, not the whole tensor.
                try:
                    parts.append(file.get_slice(key)[low - part.start : high - part.start])
                except SafetensorError:
                    raise CheckpointError(
                        f"{self._directory / file_name(kind, part.rank)} has no {key}: it was "
                        "written with another optimizer, or by another version of txl"
                    ) from None
        return torch.cat(parts)

    def memory(self, lane: int) -> dict[str, Tensor]:
        file = self._file(file_name("memory", self._manifest.rank_of_lane[lane]))
        prefix = lane_key(lane)
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}

    def _file(self, name: str) -> safe_open:
        # Opened once per checkpoint and memory-mapped; a rank opens only the files it needs.
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._directory / name} cannot be read: {error}") from None
        return self._open[name]
