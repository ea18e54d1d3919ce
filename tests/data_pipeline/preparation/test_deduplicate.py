"""Exact deduplication keeps the first document and moves no other."""

import json
from pathlib import Path

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.verify import excerpts
from tests.data_pipeline.preparation.preparing import ids_of


@pytest.mark.parametrize("shuffle", [None, 5])
def test_dedup_moves_no_document_to_another_split_or_place(
    tmp_path: Path, shuffle: int | None
) -> None:
    """Split and order hang on a document's id and number, not on its rank among those kept."""
    lines = [f'{{"text": "number {n if n % 3 else n // 4}"}}\n' for n in range(600)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(lines))
    texts = {}
    for dedup in ("none", "exact"):
        settings = PrepareSettings(split={"valid": 0.2, "test": 0.1}, shuffle=shuffle, dedup=dedup)
        prepare_dataset([source], tmp_path / dedup, settings)
        texts[dedup] = ids_of(tmp_path / dedup)
    firsts = {f"in.jsonl:{lines.index(line) + 1}" for line in lines}
    assert 350 < len(firsts) < 550
    assert texts["exact"] == {
        split: [id_ for id_ in ids if id_ in firsts] for split, ids in texts["none"].items()
    }


def test_of_documents_with_the_same_text_the_first_in_input_order_stays(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    texts = ["a", "b", "a", "c", "b", "a "]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "out"
    done = prepare_dataset([source], out, PrepareSettings(dedup="exact"))
    shown = excerpts(out, documents=9)
    assert [excerpt.document_id for excerpt in shown] == [f"in.jsonl:{n}" for n in (1, 2, 4, 6)]
    assert (done.manifest.input.documents, done.manifest.input.duplicates) == (6, 2)
    assert prepare_dataset([source], out, PrepareSettings(dedup="exact")).already_complete
