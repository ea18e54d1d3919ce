"""The example of an export: ids and exact texts, which are prepared to the same tokens again."""

import json
import subprocess
import sys
from pathlib import Path

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from txl_dist import open_split

EXAMPLE = Path(__file__).parents[2] / "examples" / "export_documents.py"
TEXTS = ["one\ntext", "zwei é \u2028 \x00 end", '{"text": "quoted"}', "a" * 5000, "last \t\r\n"]


def test_the_lines_have_the_exact_texts_and_give_the_same_tokens(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    settings = PrepareSettings(tokenizer="bpe", vocab_size=300, shuffle=3, shard_bytes=100)
    prepare_dataset([tmp_path / "train.jsonl"], tmp_path / "data", settings)
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "data"), "train"]
    output = subprocess.run(command, capture_output=True, check=True).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    split = open_split(tmp_path / "data", "train")
    assert [row["id"] for row in rows] == [document.id for document in split.documents()]
    by_line = {f"train.jsonl:{number}": text for number, text in enumerate(TEXTS, 1)}
    assert {row["id"]: row["text"] for row in rows} == by_line

    (tmp_path / "again.jsonl").write_bytes(output)
    tokenizer = tmp_path / "data" / "tokenizer.json"
    settings = PrepareSettings(tokenizer="file")
    prepare_dataset(
        [tmp_path / "again.jsonl"], tmp_path / "again", settings, tokenizer_file=tokenizer
    )
    assert tokens_of(tmp_path / "again") == tokens_of(tmp_path / "data")


def tokens_of(directory: Path) -> list[list[int]]:
    split = open_split(directory, "train")
    return [split.read(each.block, each.start, each.stop).tolist() for each in split.documents()]
