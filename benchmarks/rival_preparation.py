"""One rival of compare_preparation.py: text.jsonl to token files, encoded by `tokenizers`.

    python rival_preparation.py megatron|datasets|mds TEXT LIBRARY OUT

It imports nothing of this project, so that it runs in an environment of the rivals.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer


def main() -> None:
    """Read the command line and run."""
    rival, text, library, out = sys.argv[1:]
    run = {"megatron": megatron, "datasets": datasets, "mds": mds}[rival]
    run(Path(text), Tokenizer.from_file(library), Path(out))


def documents(text: Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids of each document with the end-of-document id behind them, as uint16 [N]."""
    end_of_document = tokenizer.get_vocab_size()
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"]).ids
            yield np.array([*ids, end_of_document], dtype=np.uint16)


def megatron(text: Path, tokenizer: Tokenizer, out: Path) -> None:
    """The files of megatron/core/datasets/indexed_dataset.py; one sequence per document."""
    out.mkdir()
    lengths = []
    with (out / "text.bin").open("wb") as file:
        for ids_N in documents(text, tokenizer):
            file.write(ids_N.tobytes(order="C"))
            lengths.append(len(ids_N))
    count, uint16_code = len(lengths), 8
    with (out / "text.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00")
        file.write(np.array([1], "<u8").tobytes() + np.array([uint16_code], "u1").tobytes())
        file.write(np.array([count, count + 1], "<u8").tobytes())
        file.write(np.array(lengths, "<i4").tobytes())
        file.write((2 * np.cumsum([0, *lengths[:-1]])).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())


def datasets(text: Path, tokenizer: Tokenizer, out: Path) -> None:
    """`map` in batches of its default size, and the directory of `save_to_disk`."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    end_of_document = tokenizer.get_vocab_size()

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        encodings = tokenizer.encode_batch(batch["text"])
        return {"ids": [[*encoding.ids, end_of_document] for encoding in encodings]}

    disable_progress_bars()
    dataset = Dataset.from_json(str(text), cache_dir=str(out.with_name("datasets-cache")))
    features = Features({"ids": List(Value("uint16"))})
    dataset.map(encode, batched=True, remove_columns=["text"], features=features).save_to_disk(out)


def mds(text: Path, tokenizer: Tokenizer, out: Path) -> None:
    """Shards of 64 MiB before compression, with a checksum each."""
    from streaming import MDSWriter

    columns = {"ids": "ndarray:uint16"}
    with MDSWriter(
        out=str(out), columns=columns, compression="zstd", hashes=["sha1"], size_limit="64mb"
    ) as writer:
        for ids_N in documents(text, tokenizer):
            writer.write({"ids": ids_N})


if __name__ == "__main__":
    main()
