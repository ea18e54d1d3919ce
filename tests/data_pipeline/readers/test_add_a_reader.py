"""The code of docs/how_to/add_a_reader.md works as printed."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.readers import FORMATS, Reject
from data_pipeline.readers.formats import FileFormat
from tests.data_pipeline.readers.reading import one_file, read, split_at_reject, texts

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "add_a_reader.md"


@pytest.fixture(autouse=True)
def _fasta_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    module, line = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"FileFormat": FileFormat}
    exec(module, names)
    for kind, about in eval("{" + line + "}", names).items():
        monkeypatch.setitem(FORMATS, kind, about)


def test_sequences_are_prepared_with_and_without_compression(
    txl: Callable[..., Any], tmp_path: Path
) -> None:
    content = b"\xef\xbb\xbf\n>one a sea\nACGT\r\nAC\n>two\n\nTT\n"
    (tmp_path / "in.fa").write_bytes(content)
    (tmp_path / "in.fa.gz").write_bytes(gzip.compress(content))
    for name in ("in.fa", "in.fa.gz"):
        assert texts(read(one_file(tmp_path / name))) == ["ACGTAC", "TT"]
        out = tmp_path / f"out-{name}"
        ended = txl("prepare", tmp_path / name, "--out", out, "--json")
        assert json.loads(ended.out)["formats"] == {"fasta": 1}
        assert json.loads(ended.out)["input"]["documents"] == 2
        shown = txl("data", "inspect", out).out
        assert f"{name}:1" in shown


@pytest.mark.parametrize(
    ("content", "good", "cause"),
    [
        (b"ACGT\n", 0, "no line with > before the first sequence"),
        (b">one\nAC\n>two\n\xff\n", 1, "invalid UTF-8: byte 0xff"),
    ],
)
def test_a_bad_sequence_is_rejected(tmp_path: Path, content: bytes, good: int, cause: str) -> None:
    (tmp_path / "in.fa").write_bytes(content)
    before, reject = split_at_reject(read(one_file(tmp_path / "in.fa")))
    assert len(before) == good
    assert cause in reject.reason
    (tmp_path / "in.fa.gz").write_bytes(gzip.compress(content)[:-9])
    assert isinstance(read(one_file(tmp_path / "in.fa.gz"))[-1], Reject)
