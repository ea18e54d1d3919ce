"""zstd frames: where they end, the seek table, and frames that are refused."""

import io
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.shards.frames import (
    MAX_FRAME_BYTES,
    Frame,
    FrameError,
    FrameWriter,
    decode_frame,
)


def write_units(units: list[bytes], *, frame_bytes: int, chunk: int) -> tuple[bytes, FrameWriter]:
    """The file of `units`, each announced, then written in chunks of any size as tarfile does."""
    file = io.BytesIO()
    writer = FrameWriter(file, frame_bytes=frame_bytes)
    for unit in units:
        writer.next_unit(len(unit))
    raw = b"".join(units)
    for start in range(0, len(raw), chunk):
        writer.write(raw[start : start + chunk])
    writer.write(b"tail")
    writer.finish()
    return file.getvalue(), writer


@given(
    sizes=st.lists(st.integers(1, 9), max_size=6),
    frame_bytes=st.integers(512, 3000),
    chunk=st.integers(1, 5000),
)
def test_frames_end_where_units_end_and_decode_to_the_stream(
    sizes: list[int], frame_bytes: int, chunk: int
) -> None:
    units = [bytes([number]) * (size * 512) for number, size in enumerate(sizes)]
    file, writer = write_units(units, frame_bytes=frame_bytes, chunk=chunk)

    ends = {frame.raw_offset + frame.raw_size for frame in writer.frames}
    assert set(np.cumsum([len(unit) for unit in units]).tolist()) <= ends
    assert all(frame.raw_size <= max(1.5 * frame_bytes + 512, 4) for frame in writer.frames)
    raw = b"".join(
        decode_frame(file[f.compressed_offset : f.compressed_offset + f.compressed_size], f)
        for f in writer.frames
    )
    assert raw == b"".join(units) + b"tail"


def test_the_seek_table_has_zstds_seekable_format() -> None:
    file, writer = write_units([b"a" * 1024, b"b" * 512], frame_bytes=512, chunk=700)
    count, descriptor, magic = struct.unpack("<IBI", file[-9:])
    assert (count, descriptor, magic) == (len(writer.frames), 0x80, 0x8F92EAB1)
    table = file[writer.frames[-1].compressed_offset + writer.frames[-1].compressed_size :]
    assert struct.unpack("<II", table[:8]) == (0x184D2A5E, len(table) - 8)
    entries = list(struct.iter_unpack("<III", table[8:-9]))
    assert entries == [(f.compressed_size, f.raw_size, f.checksum) for f in writer.frames]


def frame_of(data: bytes, *, raw_size: int) -> Frame:
    return Frame(0, len(data), 0, raw_size, int.from_bytes(data[-4:], "little"))


@pytest.mark.fault_row(20)
def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    size = 4 * MAX_FRAME_BYTES
    bomb = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(bytes(size))
    assert len(bomb) < size / 1000
    for raw_size in (size, 4096):
        with pytest.raises(FrameError, match="declares 67,108,864 bytes, the limit"):
            decode_frame(bomb, frame_of(bomb, raw_size=raw_size))


@pytest.mark.fault_row(20)
def test_a_window_over_the_limit_is_refused() -> None:
    """The header declares 128 MiB, although the content is small."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=27, write_checksum=True, write_content_size=False
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = bytearray(stream.compress(b"x" * 5000) + stream.flush())
    data[4] |= 0x40  # with a content size of two bytes, RFC 8878, section 3.1.1
    data[6:6] = (5000 - 256).to_bytes(2, "little")
    declared = zstandard.get_frame_parameters(bytes(data))
    assert (declared.window_size, declared.content_size) == (2**27, 5000)
    with pytest.raises(FrameError, match="declares 134,217,728 bytes, the limit"):
        decode_frame(bytes(data), frame_of(bytes(data), raw_size=5000))


ONE, OTHER = (
    zstandard.ZstdCompressor(level=3, write_checksum=True).compress(byte * 999)
    for byte in (b"a", b"b")
)


@pytest.mark.parametrize(
    ("data", "raw_size", "problem"),
    [
        (OTHER, 999, "its checksum is"),  # valid, as in a swapped shard
        (ONE + ONE, 999, "zstd cannot decode it"),
        (ONE[:-1], 999, "its checksum is"),
        (b"", 999, "its checksum is"),
        (ONE, 998, "it has 999 raw bytes, the index 998"),
    ],
    ids=["other content", "two frames", "cut", "empty", "another size"],
)
def test_other_bytes_in_place_of_a_frame_are_refused(
    data: bytes, raw_size: int, problem: str
) -> None:
    assert len(ONE) == len(OTHER)
    with pytest.raises(FrameError, match=problem):
        decode_frame(data, frame_of(ONE, raw_size=raw_size))
