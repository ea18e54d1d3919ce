"""A small made corpus in the layouts in which WikiText-103 is published."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SIZES = {"train": 2000, "valid": 300, "test": 200}
"""Words of every split, without those of titles."""


def wikitext(num_words: int) -> str:
    """Articles in the form of WikiText: titles, blank lines, frequent and rare words."""
    rng = random.Random(3)
    words = [f"w{int(rng.paretovariate(0.8)) % 300}" for _ in range(num_words)]
    lines = [" ".join(words[i : i + 11]) for i in range(0, num_words, 11)]
    for i in range(0, len(lines), 5):
        lines[i] = f"\n = Article {i} = \n \n {lines[i]}"
    return "".join(f" {line} \n" for line in lines)


def write_tokens(directory: Path) -> Path:
    """The folder that wikitext-103-v1.zip contains."""
    folder = directory / "wikitext-103"
    folder.mkdir(parents=True)
    for split, size in SIZES.items():
        (folder / f"wiki.{split}.tokens").write_text(wikitext(size))
    return folder


def write_parquet(directory: Path) -> Path:
    """Hugging Face's Salesforce/wikitext: one line per row, "" for a blank line. Returns the folder
    of WikiText-103, which has other configurations too.
    """
    for name in ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-v1"):
        folder = directory / name
        folder.mkdir(parents=True)
        for split, size in SIZES.items():
            lines = wikitext(size if name == "wikitext-103-v1" else 99).splitlines(keepends=True)
            rows = [line if line.strip() else "" for line in lines]
            published = {"valid": "validation"}.get(split, split)
            parts = [rows[:50], rows[50:]] if split == "train" else [rows]
            for n, part in enumerate(parts):
                path = folder / f"{published}-{n:05}-of-{len(parts):05}.parquet"
                pq.write_table(pa.table({"text": part}), path)
    return directory / "wikitext-103-v1"
