import json
from pathlib import Path

from data_pipeline.readers import Record, Reject
from tests.data_pipeline.readers.reading import one_file, read


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def test_a_key_twice_in_an_object_is_named(tmp_path: Path) -> None:
    lines = b'{"text": "a", "x": {"k": 1, "k": 1}}\n{"text": "b", "text": "c"}\n'
    (tmp_path / "in.jsonl").write_bytes(lines + jsonl("d"))
    one, two, three = read(one_file(tmp_path / "in.jsonl"))
    assert isinstance(one, Reject)
    assert 'key "k" twice' in one.reason
    assert isinstance(two, Reject)
    assert (two.line, two.byte) == (2, 37)
    assert 'key "text" twice' in two.reason
    assert isinstance(three, Record)
