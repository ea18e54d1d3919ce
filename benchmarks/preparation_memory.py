"""Peak memory of `txl prepare` with a vocabulary trained on the text, for texts of growing size.

    python benchmarks/preparation_memory.py [--megabytes 10 50 250 1000] [--workers 1]

The text is Python source code of this installation, one JSON line per file. When all files are
used, they follow again with their letters rotated, so that words of the vocabulary stay new.
Printed is what the command reports: the largest resident set of the main process or of a worker.
"""

import argparse
import json
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from compare_preparation import sources

LIMIT_MEBIBYTES = 300


def main() -> None:
    """Prepare a text of each size; exits with 1 if one takes more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 50, 250, 1000])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    peaks = []
    print(f"{'MB':>6}{'peak MiB':>10}{'limit':>7}{'seconds':>9}")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory(prefix="txl-memory-") as name:
            text = Path(name) / "text.jsonl"
            write_text(text, megabytes * 10**6)
            report = prepare(text, Path(name) / "data", options.workers)
        peaks.append(report["peak_memory_bytes"] / 2**20)
        row = f"{megabytes:>6}{peaks[-1]:>10.0f}{LIMIT_MEBIBYTES:>7}{report['seconds']:>9.0f}"
        print(row, flush=True)
    sys.exit(max(peaks) > LIMIT_MEBIBYTES)


def write_text(path: Path, num_bytes: int) -> None:
    written = 0
    with path.open("w") as file:
        for text in texts():
            written += file.write(json.dumps({"text": text}) + "\n")
            if written >= num_bytes:
                return


def texts() -> Iterator[str]:
    """All source files, repeatedly, each time with other words."""
    letters = string.ascii_lowercase
    for repetition in count():
        shift = repetition % len(letters)
        rotated = str.maketrans(letters, letters[shift:] + letters[:shift])
        for source in sources():
            yield source.read_text(encoding="utf-8", errors="replace").translate(rotated)


def prepare(text: Path, out: Path, workers: int) -> dict[str, float]:
    """The report of `txl prepare`."""
    command = [sys.executable, "-m", "txl_dist", "prepare", text, "--out", out, "--json",
               "--tokenizer", "bpe", "--vocab-size", "32768", "--workers", workers]  # fmt: skip
    words = [str(word) for word in command]
    result = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    report: dict[str, float] = json.loads(result.stdout)
    return report


if __name__ == "__main__":
    main()
