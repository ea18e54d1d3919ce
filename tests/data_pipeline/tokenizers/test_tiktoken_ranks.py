"""Vocabularies that tiktoken may encode, and those it may not."""

import json
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.tokenizers import load_tokenizer
from data_pipeline.tokenizers.pretrained import (
    from_library_json,
)
from data_pipeline.tokenizers.tiktoken_ranks import ranked_bytes
from tests.data_pipeline.tokenizers.sample_tokenizers import TOKENIZER, byte_level


def damaged(name: str) -> dict[str, object]:
    content = json.loads(TOKENIZER.to_json())
    model = content["tokenizer"]["model"]
    vocab, merges = model["vocab"], model["merges"]
    last = "".join(merges[-1])
    if name == "gap":
        vocab[last] = 5000
    elif name == "two tokens of one id":
        vocab[last] = 7
    elif name == "a merge less":
        merges.pop()
    elif name == "merges out of order":
        merges[5], merges[20] = merges[20], merges[5]
    elif name == "ids out of order":
        first = "".join(merges[0])
        vocab[first], vocab[last] = vocab[last], vocab[first]
    elif name == "no token":
        model["vocab"] = {}
    elif name == "a normalizer":
        content["tokenizer"]["normalizer"] = {"type": "NFC"}
    elif name == "another split":
        content["tokenizer"]["pre_tokenizer"]["add_prefix_space"] = True
    elif name == "end in the vocabulary":
        content["end_of_document"] = 300
    elif name == "end too high":
        content["end_of_document"] = 700
    elif name == "end no number":
        content["end_of_document"] = True
    elif name == "no library":
        content["tokenizer"] = {"model": 3}
    return content


@pytest.mark.parametrize(
    "name",
    [
        "gap",
        "two tokens of one id",
        "a merge less",
        "merges out of order",
        "ids out of order",
        "no token",
        "a normalizer",
        "another split",
        "end in the vocabulary",
        "end too high",
        "end no number",
        "no library",
    ],
)
def test_a_damaged_vocabulary_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(damaged(name)))
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(path)


def test_merges_on_which_tiktoken_would_differ_go_through_the_library() -> None:
    """`abc` is made of ab and c only, but bc comes first: the library leaves a and bc apart."""
    content = byte_level(("b", "c"), ("a", "b"), ("ab", "c"))
    with pytest.raises(ValueError, match="abc"):
        ranked_bytes(content, leave_out=None)
    tokenizer = from_library_json(content, "x.json")
    assert tokenizer.cuts == "never"
    assert not tokenizer.lossless
    assert tokenizer.encode("abc").tolist() == tokenizer.library_ids("abc")
    assert len(tokenizer.encode("abc")) == 2
