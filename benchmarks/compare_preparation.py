"""Text to token files: `txl prepare` compared with other training systems on the same text.

    python benchmarks/compare_preparation.py [--megabytes 30] [--python PYTHON]

The text is Python source code of this installation, one JSON line per file. Its byte-level BPE of
32,768 ids is trained before. Each row is one process with one thread:

- `txl prepare`, with everything it does: checksums, indexes, a manifest, compressed shards
- the loop of Megatron-LM's tools/preprocess_data.py with one worker: a JSON line is decoded and
  encoded by `tokenizers`, its ids are appended to a .bin file, and an .idx file lists the documents
- `datasets`: `map` in batches with `tokenizers`, then `save_to_disk`
- `MDSWriter` of mosaicml-streaming with zstd: ids by `tokenizers`, as one array per document

The other tools run with --python, in whose environment `datasets` and `mosaicml-streaming` may be
installed; a row whose library is missing says so. CPU seconds are those of the process and its
children, imports included. Before the table, the ids of all documents by `txl prepare` are compared
with those of Megatron's loop; exits with 1 if one differs.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_pipeline.shards.shard_reader import open_split
from data_pipeline.tokenizers.loading import load_tokenizer

VOCAB_SIZE = 32_768
RIVALS = {
    "Megatron-LM's loop": "megatron",
    "datasets.map, save_to_disk": "datasets",
    "MDSWriter, zstd": "mds",
}


def main() -> None:
    """Prepare the text in all ways; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=30)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the other tools")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="txl-compare-") as name:
        folder = Path(name)
        text = folder / "text.jsonl"
        megabytes = write_text(text, options.megabytes * 10**6) / 1e6
        tokenizer = train_tokenizer(text, folder)
        print(f"{megabytes:.1f} MB, {len(text.read_text().splitlines()):,} documents")
        print(f"{'':<28}{'MB per CPU-s':>13}{'CPU-s':>8}{'MB on disk':>12}", flush=True)
        ours = [sys.executable, "-m", "txl_dist", "prepare", text, "--out", folder / "txl",
                "--tokenizer", tokenizer]  # fmt: skip
        print_row("txl prepare", ours, folder / "txl", megabytes)
        for title, rival in RIVALS.items():
            out = folder / rival
            program = Path(__file__).with_name("rival_preparation.py")
            print_row(
                title,
                [options.python, program, rival, text, folder / "library.json", out],
                out,
                megabytes,
            )
        differing = num_differing(folder / "txl", folder / "megatron")
    print(f"documents whose ids differ between txl prepare and tokenizers: {differing}")
    sys.exit(differing > 0)


def write_text(path: Path, num_bytes: int) -> int:
    """One JSON line per source file, up to about `num_bytes`; returns the bytes of the texts."""
    total = 0
    with path.open("w") as file:
        for source in sources():
            try:
                text = source.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text:
                file.write(json.dumps({"text": text}) + "\n")
                total += len(text.encode())
            if total >= num_bytes:
                break
    return total


def sources() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    for folder in (paths["stdlib"], paths["purelib"]):
        yield from sorted(Path(folder).rglob("*.py"))


def train_tokenizer(text: Path, folder: Path) -> Path:
    """The tokenizer.json of a dataset of the same text; not timed.

    Beside it lies library.json, the same for `tokenizers`, without the end-of-document id.
    """
    subprocess.run(
        [sys.executable, "-m", "txl_dist", "prepare", text, "--out", folder / "trained",
         "--tokenizer", "bpe", "--vocab-size", str(VOCAB_SIZE)],
        check=True, capture_output=True,
    )  # fmt: skip
    tokenizer = folder / "trained" / "tokenizer.json"
    library = json.loads(tokenizer.read_text())["tokenizer"]
    (folder / "library.json").write_text(json.dumps(library))
    return tokenizer


def print_row(title: str, command: list[object], out: Path, megabytes: float) -> None:
    """Run a command, and print what it took."""
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = cpu_seconds()
    result = subprocess.run(
        [str(word) for word in command],
        check=False,
        env=os.environ | threads,
        capture_output=True,
        text=True,
    )
    seconds = cpu_seconds() - before
    if result.returncode:
        print(f"{title:<28}  not run: {result.stderr.strip().splitlines()[-1]}", flush=True)
        return
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6
    print(f"{title:<28}{megabytes / seconds:13.1f}{seconds:8.1f}{size:12.1f}", flush=True)


def cpu_seconds() -> float:
    """Of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def num_differing(ours: Path, megatron: Path) -> int:
    """Documents of a dataset of ours whose ids are not those in the .bin file of Megatron-LM."""
    split = open_split(ours, "train")
    blocks = [split.read(i, 0, int(n)) for i, n in enumerate(split.block_tokens)]
    end_of_document = load_tokenizer(ours / "tokenizer.json").end_of_document
    first = documents(np.concatenate(blocks), end_of_document)
    second = documents(np.fromfile(megatron / "text.bin", np.uint16), end_of_document)
    differing = sum(not np.array_equal(a, b) for a, b in zip(first, second, strict=False))
    return differing + abs(len(first) - len(second))


def documents(ids_N: np.ndarray, end_of_document: int) -> list[np.ndarray]:
    """The ids of each document, without those that separate them."""
    parts = np.split(ids_N, np.flatnonzero(ids_N == end_of_document))
    return [ids for part in parts if (ids := part[part != end_of_document]).size]


if __name__ == "__main__":
    main()
