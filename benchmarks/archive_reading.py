"""CPU time and memory of `txl prepare` for the same text as files, as archives and compressed.

    python benchmarks/archive_reading.py [--megabytes 20] [--rounds 3]

The text is Python source code of this installation: 40 text files, and one file with all of them.
Every form is prepared once per round, in turn, each in a separate process with one worker and
byte tokens. Prints the median over rounds of the CPU seconds (imports included), their ratio to the
unpacked form, and the peak memory. Exits with 1 if an archive gives another dataset than its
folder.
"""

import argparse
import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

NUM_FILES = 40


def main() -> None:
    """Prepare all forms in turn; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="txl-archives-") as name:
        folder = Path(name)
        forms = write_forms(folder, options.megabytes * 10**6)
        results: dict[str, list[tuple[float, int, str]]] = {form: [] for form in forms}
        for number in range(options.rounds):
            for form, path in forms.items():
                results[form].append(prepare(path, folder / f"out-{number}-{form}"))
        print(f"{'':<14}{'stored MB':>10}{'CPU-s':>8}{'ratio':>7}{'peak MiB':>10}")
        bases = {"files": "folder", "one file": "file"}
        digests: dict[str, set[str]] = {}
        for form, path in forms.items():
            kind = "one file" if form.startswith("file") else "files"
            cpu = median(seconds for seconds, _, _ in results[form])
            base = median(seconds for seconds, _, _ in results[bases[kind]])
            peak = max(peak for _, peak, _ in results[form])
            stored = stored_bytes(path) / 1e6
            print(f"{form:<14}{stored:>10.1f}{cpu:>8.2f}{cpu / base:>7.2f}{peak / 2**20:>10.0f}")
            if kind == "files":
                digests.setdefault(kind, set()).update(digest for *_, digest in results[form])
    if any(len(each) > 1 for each in digests.values()):
        sys.exit("an archive gives another dataset than its folder")


def write_forms(folder: Path, num_bytes: int) -> dict[str, Path]:
    """The same text in all forms, by name."""
    texts = folder / "texts"
    texts.mkdir()
    whole = b"".join(source_code(num_bytes))
    step = -(-len(whole) // NUM_FILES)
    for number in range(NUM_FILES):
        part = whole[number * step : (number + 1) * step].decode(errors="ignore")
        (texts / f"part-{number:02}.en").write_text(part)
    forms = {"folder": texts, "folder.zip": folder / "texts.zip"}
    with zipfile.ZipFile(forms["folder.zip"], "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(texts.iterdir()):
            archive.write(path, f"texts/{path.name}")
    for suffix, mode in ((".tar", "w"), (".tar.gz", "w:gz"), (".tar.xz", "w:xz")):
        forms[f"folder{suffix}"] = folder / f"texts{suffix}"
        with tarfile.open(forms[f"folder{suffix}"], mode) as packed:  # type: ignore[call-overload]
            packed.add(texts, "texts")
    text = whole.decode(errors="ignore").encode()
    packs = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    for suffix, compress in packs.items():
        forms[f"file{suffix}"] = folder / f"text.txt{suffix}"
        forms[f"file{suffix}"].write_bytes(compress(text))
    forms["file.zip"] = folder / "text.zip"
    with zipfile.ZipFile(forms["file.zip"], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text.txt", text)
    return forms


def source_code(num_bytes: int) -> Iterator[bytes]:
    """UTF-8 source files of the standard library and of the installed packages."""
    left = num_bytes
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    for path in (path for folder in folders for path in sorted(Path(folder).rglob("*.py"))):
        raw = path.read_bytes()[:left]
        if b"\0" not in raw:
            yield raw
            left -= len(raw)
        if left <= 0:
            return


def prepare(path: Path, out: Path) -> tuple[float, int, str]:
    """CPU seconds, peak memory in bytes and digest of the dataset."""
    command = [sys.executable, "-m", "txl_dist", "prepare", path, "--out", out, "--json"]
    before = os.times()
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    after = os.times()
    content = json.loads(result.stdout)
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return cpu, content["peak_memory_bytes"], content["digest"]


def stored_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else [path]))


if __name__ == "__main__":
    main()
