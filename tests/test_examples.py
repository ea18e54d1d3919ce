"""The examples: each does what it is for, is short, and uses public names only."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import symusic

import txl_dist
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from examples.recall_agent import NUM_CUES, train

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(name: str, *words: object) -> str:
    (path,) = (path for path in EXAMPLES if path.stem == name)
    ended = subprocess.run(
        [sys.executable, path, *map(str, words)], capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.decode("utf-8")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_uses_public_names_only(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 200
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [
        node
        for node in imported
        if (node.module or "").partition(".")[0] in ("txl_dist", "data_pipeline", "cluster")
    ]
    assert {node.module for node in ours} <= {"txl_dist"}
    assert {alias.name for node in ours for alias in node.names} <= set(txl_dist.__all__)


def test_minimal_train_scores_the_model_that_it_wrote(dataset: Path, tmp_path: Path) -> None:
    output = run("minimal_train", dataset, "--out", tmp_path / "model", "--steps", 30)
    losses = [float(loss) for loss in re.findall(r"step \d+ \| loss ([\d.]+)", output)]
    assert losses[-1] < 0.8 * losses[0]
    (score,) = re.findall(r"valid: loss ([\d.]+)", output)
    result = txl_dist.evaluate(txl_dist.evaluation_spec(tmp_path / "model", dataset))
    assert score == f"{result.sums.nats_per_token:.4f}"


def test_exported_documents_have_the_exact_texts_and_give_the_same_tokens(tmp_path: Path) -> None:
    texts = ["one\ntext", "zwei é \u2028 \x00 end", '{"text": "quoted"}', "a" * 5000, "last \t\r\n"]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    settings = PrepareSettings(tokenizer="bpe", vocab_size=300, shuffle=3, shard_bytes=100)
    prepare_dataset([tmp_path / "train.jsonl"], tmp_path / "data", settings)
    output = run("export_documents", tmp_path / "data", "train")
    rows = [json.loads(line) for line in output.split("\n") if line]
    split = txl_dist.open_split(tmp_path / "data", "train")
    assert [row["id"] for row in rows] == [document.id for document in split.documents()]
    by_line = {f"train.jsonl:{number}": text for number, text in enumerate(texts, 1)}
    assert {row["id"]: row["text"] for row in rows} == by_line

    (tmp_path / "again.jsonl").write_bytes(output.encode())
    tokenizer = tmp_path / "data" / "tokenizer.json"
    settings = PrepareSettings(tokenizer="file")
    prepare_dataset(
        [tmp_path / "again.jsonl"], tmp_path / "again", settings, tokenizer_file=tokenizer
    )
    assert tokens_of(tmp_path / "again") == tokens_of(tmp_path / "data")


def tokens_of(directory: Path) -> list[list[int]]:
    split = txl_dist.open_split(directory, "train")
    return [split.read(each.block, each.start, each.stop).tolist() for each in split.documents()]


def test_music_continues_a_piece(tmp_path: Path) -> None:
    """From MIDI files to a MIDI file, by a real MidiTok."""
    out = tmp_path / "music"
    output = run("music", "--out", out, "--steps", 16, "--notes", 5)
    (score,) = re.findall(r"valid: perplexity ([\d.]+)", output)
    assert float(score) < len(json.loads((out / "names.json").read_text())) / 2
    # One document per piece, and no piece in two splits.
    manifest = json.loads((out / "data" / "manifest.json").read_text())
    documents = {name: split["documents"] for name, split in manifest["splits"].items()}
    assert sum(documents.values()) == len(list((out / "midi").glob("*.mid"))) == 40
    (counts,) = re.findall(r"(\d+) notes read, (\d+) drawn", output)
    read, drawn = map(int, counts)
    written = symusic.Score(out / "continued.mid")
    assert written.note_num() == read + drawn
    assert 0 <= drawn <= 5


@pytest.mark.parametrize("mem_len", [16, 0])
def test_the_agent_remembers_with_memory_only(mem_len: int) -> None:
    reward = train(mem_len, num_windows=400)
    if mem_len:
        assert reward > 0.85
    else:
        # 320 episodes: chance is 0.25, with a standard deviation of 0.024.
        assert reward < 1 / NUM_CUES + 0.1
