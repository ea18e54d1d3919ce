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
def _csv_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    module, line = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"FileFormat": FileFormat}
    exec(module, names)
    for kind, about in eval("{" + line + "}", names).items():
        monkeypatch.setitem(FORMATS, kind, about)


def test_rows_are_prepared_with_and_without_compression(
    txl: Callable[..., Any], tmp_path: Path
) -> None:
    content = '\ufeffid,body\r\n1,"a ""sea"", grey\r\nand wide"\r\n2,é\r\n'.encode()
    (tmp_path / "in.csv").write_bytes(content)
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(content))
    for name in ("in.csv", "in.csv.gz"):
        records = read(one_file(tmp_path / name), text_key="body")
        assert texts(records) == ['a "sea", grey\r\nand wide', "é"]
        out = tmp_path / f"out-{name}"
        ended = txl("prepare", tmp_path / name, "--out", out, "--text-key", "body", "--json")
        assert json.loads(ended.out)["formats"] == {"csv": 1}
        assert json.loads(ended.out)["input"]["documents"] == 2
        shown = txl("data", "inspect", out).out
        assert f"{name}:1" in shown


@pytest.mark.parametrize(
    ("content", "good", "cause"),
    [
        (b"id,body\n1,x\n", 0, 'no "text" here; columns: id, body'),
        (b'text\nx\n"half', 1, "damaged CSV: unexpected end of data"),
        (b"text\n\xff\n", 0, "damaged CSV: 'utf-8' codec can't decode"),
        (b"text\nx\n" + b"y" * 200_000, 1, "field larger than field limit"),
    ],
)
def test_a_bad_row_is_rejected(tmp_path: Path, content: bytes, good: int, cause: str) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    before, reject = split_at_reject(read(one_file(tmp_path / "in.csv")))
    assert len(before) == good
    assert cause in reject.reason
    assert reject.line == good + 1
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(content)[:-9])
    assert isinstance(read(one_file(tmp_path / "in.csv.gz"))[-1], Reject)
