"""Writes a safetensors file tensor by tensor, and computes its size and sha256 in the same pass.

`safetensors.numpy.save_file` builds the content of the whole file in memory before it writes, which
would double the memory of a save. The format is 8 bytes with the length of the header
(little-endian), the header (JSON: dtype, shape and byte range of each tensor), then the tensors.
Files are equal, byte by byte, to those of the library, which reads them.

Source: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from data_pipeline.system.direct_file import DirectFile
from txl_dist.checkpoint.manifest import FileEntry

BLOCK_BYTES = 8 * 2**20
_ALIGNMENT = 8
"""The header is padded with spaces, so that the tensors are aligned in a memory map."""


def write_tensors(
    path: Path, arrays: Mapping[str, np.ndarray], *, before_block: Callable[[], None]
) -> FileEntry:
    """Write and sync the fp32 `arrays`; returns the file's entry for the manifest.

    Calls `before_block` before each block of a tensor; an exception it raises ends the writing. The
    file is not atomic: write it into a staging directory.
    """
    sha256, num_bytes = hashlib.sha256(), 0
    with DirectFile(path) as file:
        for block in _blocks(arrays):
            before_block()
            file.write(block)
            sha256.update(block)
            num_bytes += len(block)
    return FileEntry(bytes=num_bytes, sha256=sha256.hexdigest())


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
