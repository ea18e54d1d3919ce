"""Files of token ids as other programs write them."""

import json
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from data_pipeline.readers import IdRules

END, VOCAB_SIZE = 0, 500
RULES = IdRules(VOCAB_SIZE, END, "<u2")
Documents = list[list[int]]


def npy(array: object, **options: object) -> bytes:
    file = BytesIO()
    np.save(file, array, **options)  # type: ignore[arg-type]
    return file.getvalue()


def separated(documents: Documents) -> np.ndarray:
    """One stream, every document closed by the end-of-document id."""
    return np.array([id_ for document in documents for id_ in (*document, END)], "<u2")


def megatron_index(documents: Documents, *, size: int = 2, code: int = 8) -> bytes:
    """The .idx file of Megatron-LM for one sequence per document, by the published layout."""
    lengths = np.array([len(document) for document in documents], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * size]).astype("<i8")
    bounds = np.arange(len(documents) + 1, dtype=np.int64)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    return header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes()


def write_megatron(path: Path, documents: Documents) -> None:
    path.write_bytes(b"".join(np.array(document, "<u2").tobytes() for document in documents))
    path.with_suffix(".idx").write_bytes(megatron_index(documents))


def write_parquet(path: Path, documents: Documents) -> None:
    lists = pa.array(documents, pa.list_(pa.int32()))
    parquet.write_table(pa.table({"ids": lists}), path, row_group_size=2)


def write_arrow(path: Path, documents: Documents) -> None:
    table = pa.table({"ids": pa.array(documents, pa.large_list(pa.int16()))})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS: dict[str, Callable[[Path, Documents], object]] = {
    "jsonl": lambda path, documents: path.write_text(
        "".join(json.dumps({"ids": document}) + "\n" for document in documents)
    ),
    "json": lambda path, documents: path.write_text(json.dumps({"ids": documents})),
    "npy": lambda path, documents: np.save(path, separated(documents)),
    "parquet": write_parquet,
    "arrow": write_arrow,
    "megatron.bin": write_megatron,
    "bin": lambda path, documents: separated(documents).tofile(path),
}
"""Suffix of the file, which decides the kind, and the function that writes it."""
