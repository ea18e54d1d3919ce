"""`txl bench data`, preparation: rate, size on disk and detection of damage.

The text is available on every machine: source code and documentation of this Python's standard
library and installed packages, one document per file. Rates are per CPU second of this process,
which prepares without workers, so other load on the machine has little effect.
"""

import gc
import random
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import TOKENIZER_NAME, ShardManifest, SplitEntry
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.tokenizers import load_tokenizer
from data_pipeline.tokenizers.pretrained import PretrainedTokenizer
from txl_dist.bench.rounds import Figure

VOCAB_SIZE = 32_768
_SUFFIXES = (".py", ".rst", ".md", ".txt")
_SENTENCE_CHARACTERS = range(80, 401)
_MOST_SENTENCES = 60_000
_FLIPS = 300
_LINES = range(100_000)
_SLOW_TEXTS = 300


@dataclass(frozen=True, slots=True)
class BenchText:
    """A folder of documents and a tokenizer trained on them."""

    folder: Path
    tokenizer: Path
    num_bytes: int


def gather_text(work: Path, *, megabytes: float) -> BenchText:
    """Copy `megabytes` of documents of this Python to `work`, and train BPE on them."""
    folder, size = work / "text", 0
    for number, path in enumerate(_documents()):
        if size >= megabytes * 1e6:
            break
        text = path.read_bytes()
        if _is_text(text):
            target = folder / f"{number // 1000:03d}" / f"{number:06d}{path.suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text)
            size += len(text)
    # Training the tokenizer is not part of the rates: every figure reads its file.
    settings = PrepareSettings(tokenizer="bpe", vocab_size=VOCAB_SIZE)
    prepare_dataset([folder], work / "trained", settings)
    return BenchText(folder, work / "trained" / TOKENIZER_NAME, size)


def _documents() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    for root in (Path(paths["stdlib"]), Path(paths["purelib"])):
        files = (path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
        # The standard library's folder contains site-packages, which the second root lists.
        inside = "site-packages"
        yield from sorted(p for p in files if inside not in p.relative_to(root).parts)


def _is_text(content: bytes) -> bool:
    try:
        return bool(content.decode("utf-8").strip())
    except UnicodeDecodeError:
        return False


def rate_figures(text: BenchText, work: Path) -> Iterator[Figure]:
    """The rate of BPE preparation from files to shards, also relative to the tokenizer alone."""
    settings = PrepareSettings(tokenizer="file")
    spent = _cpu_seconds(
        lambda: prepare_dataset(
            [text.folder], work / "prepared", settings, tokenizer_file=text.tokenizer
        )
    )
    rate, alone = text.num_bytes / 1e6 / spent, _encoder_rates(text)
    listed = ", ".join(f"{name} {each:.1f}" for name, each in alone.items())
    note = f"{text.num_bytes / 1e6:.0f} MB; alone: {listed}"
    yield Figure("BPE preparation, files to shards", rate, "MB per CPU-s", 15.0, note=note)
    fastest = next(iter(alone))
    yield Figure(f"the same, relative to {fastest} alone", rate / alone[fastest], "", 0.4)
    yield from _training_and_lines_figures(text, work)


def _encoder_rates(text: BenchText) -> dict[str, float]:
    """MB per CPU-second of the encoders alone, document by document, the fastest first."""
    tokenizer = load_tokenizer(text.tokenizer)
    assert isinstance(tokenizer, PretrainedTokenizer)
    paths = [path for path in sorted(text.folder.rglob("*")) if path.is_file()]
    texts = [path.read_bytes().decode("utf-8") for path in paths]
    few = texts[:: max(1, len(texts) // _SLOW_TEXTS)]  # enough for a rate
    tokenizer.encode("")  # loads the library
    runs: dict[str, tuple[Callable[[str], object], list[str]]] = {
        tokenizer.encoder.split()[0]: (tokenizer.encode, texts),
        "tiktoken": (tokenizer.reference_ids, texts),
        "tokenizers": (tokenizer.library_ids, few),
    }
    return {name: _encoding_rate(*run) for name, run in runs.items()}


def _encoding_rate(encode: Callable[[str], object], documents: list[str]) -> float:
    num_bytes = sum(len(document.encode()) for document in documents)
    return num_bytes / 1e6 / _cpu_seconds(lambda: [encode(document) for document in documents])


def _training_and_lines_figures(text: BenchText, work: Path) -> Iterator[Figure]:
    settings = PrepareSettings(tokenizer="bpe", vocab_size=VOCAB_SIZE)
    spent = _cpu_seconds(lambda: prepare_dataset([text.folder], work / "from-text", settings))
    rate = text.num_bytes / 1e6 / spent
    yield Figure("the same with a vocabulary trained first", rate, "MB per CPU-s", 5.0)
    lines = work / "short.txt"
    lines.write_text("".join(f"{number:08d} {'short line ' * 4}"[:49] + "\n" for number in _LINES))
    by_line = PrepareSettings(format="lines")
    spent = _cpu_seconds(lambda: prepare_dataset([lines], work / "short", by_line))
    name = f"{len(_LINES):,} lines of 49 bytes, byte tokens"
    yield Figure(name, spent, "CPU-s", 1.0, at_most=True)


def size_figures(text: BenchText, work: Path) -> Iterator[Figure]:
    """Size of shards relative to the text, and of one document per sentence to one document."""
    manifest = _prepare(text, text.folder, work / "sized", "text")
    entry = manifest.splits["train"]
    note = f"with indexes {_with_indexes(entry) / entry.text_bytes:.3f}"
    ratio = _shards(entry) / entry.text_bytes
    yield Figure(
        "size, zstd level 3, relative to the raw text", ratio, "", 0.20, at_most=True, note=note
    )

    sentences, long = work / "sentences.txt", work / "long.txt"
    lines = _sentences(text)
    sentences.write_text("\n".join(lines) + "\n", "utf-8")
    long.write_text("\n".join(lines) + "\n", "utf-8")
    many = _prepare(text, sentences, work / "each", "lines").splits["train"]
    single = _prepare(text, long, work / "together", "text").splits["train"]
    ratio = _shards(many) / _shards(single)
    ratio_with_indexes = _with_indexes(many) / _with_indexes(single)
    mean = sum(map(len, lines)) / len(lines)
    note = f"{len(lines):,} of {mean:.0f} characters; with indexes {ratio_with_indexes:.2f}"
    yield Figure(
        "size of sentences, relative to one document", ratio, "", 1.10, at_most=True, note=note
    )


def _sentences(text: BenchText) -> list[str]:
    """Lines with the length of sentences; those of One Billion Word have about 140 characters."""
    lines = []
    for path in sorted(text.folder.rglob("*")):
        if path.is_file():
            lines += [line.strip() for line in path.read_text("utf-8").splitlines()]
    return [line for line in lines if len(line) in _SENTENCE_CHARACTERS][:_MOST_SENTENCES]


def _prepare(text: BenchText, source: Path, out: Path, format: str) -> ShardManifest:
    settings = PrepareSettings(tokenizer="file", format=format)
    return prepare_dataset([source], out, settings, tokenizer_file=text.tokenizer).manifest


def _shards(entry: SplitEntry) -> int:
    return sum(shard.bytes for shard in entry.shards)


def _with_indexes(entry: SplitEntry) -> int:
    return sum(shard.bytes + shard.index_bytes for shard in entry.shards)


def damage_figure(text: BenchText, work: Path) -> Figure:
    """Flip single random bits of a shard; count how many change tokens without an error."""
    small = work / "small"
    files = sorted(path for path in text.folder.rglob("*") if path.is_file())
    # A small shard: every flip reads all of it again.
    small.mkdir()
    for path in files[:60]:
        shutil.copy(path, small)
    directory = work / "flipped"
    manifest = _prepare(text, small, directory, "text")
    path = directory / manifest.splits["train"].shards[0].name
    path.chmod(0o644)
    shard_bytes, expected = path.read_bytes(), _tokens(open_split(directory, "train"))
    unnoticed = 0
    for seed in range(_FLIPS):
        bit = random.Random(seed).randrange(len(shard_bytes) * 8)
        damaged = bytearray(shard_bytes)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            unnoticed += not np.array_equal(_tokens(open_split(directory, "train")), expected)
        except DataError:
            continue  # detected
    return Figure("random bit flips not detected", unnoticed, f"of {_FLIPS}", 0, at_most=True)


def _tokens(reader: SplitReader) -> np.ndarray:
    blocks = enumerate(reader.block_tokens)
    return np.concatenate([reader.read(block, 0, int(length)) for block, length in blocks])


def _cpu_seconds(run: Callable[[], object]) -> float:
    # The garbage collector would repeatedly scan the objects of earlier measurements.
    gc.collect()
    gc.freeze()
    began = time.process_time()
    run()
    return time.process_time() - began
