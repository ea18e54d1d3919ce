"""Damaged files of every format are rejected."""

from pathlib import Path

import pytest

from tests.txl_dist.convert.example_files import hf_copy
from txl_dist.convert.formats import read_model
from txl_dist.errors import CheckpointError


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 cut off", b"\x80\x04\x95 cut off", b"text"])
def test_damaged_files(tmp_path: Path, data: bytes) -> None:
    source = hf_copy(tmp_path / "hf")
    (tmp_path / "bad.npz").write_bytes(data)
    (source / "pytorch_model.bin").write_bytes(data)
    for path in (source, tmp_path / "bad.npz"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_model(path)
    (source / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_model(source)
