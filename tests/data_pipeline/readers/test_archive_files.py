"""Archives: the same datasets as their unpacked folders; WebDatasets; damaged and hostile ones."""

import bz2
import errno
import gzip
import io
import lzma
import random
import struct
import tarfile
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import ConfigError, DataError, UnfinishedError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.readers import InputFiles, find_files
from data_pipeline.readers.unpack import UNPACKED, removed_afterwards
from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.files import STAGING
from tests.data_pipeline.preparation.preparing import files_of, stop_after
from tests.data_pipeline.readers.reading import kinds_of, only_reject, read, rejects, texts
from tests.data_pipeline.readers.test_tar import archive as tar_of
from tests.data_pipeline.readers.test_tar import member
from tests.support.corpus_layouts import ARCHIVE_SUFFIXES, LAYOUTS, Layout, pack, write_files

BYTES = PrepareSettings()


def find(archive: Path | str, folder: Path, format: str = "auto") -> InputFiles:
    """List the files, unpacked in `folder`."""
    with removed_afterwards(folder / UNPACKED):
        pass
    return find_files([str(archive)], format=format, out=folder)


def prepared(source: Path | str, out: Path, settings: PrepareSettings = BYTES) -> dict[str, bytes]:
    prepare_dataset([source], out, settings)
    return files_of(out)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_an_archive_gives_the_dataset_of_its_unpacked_folder(
    tmp_path: Path, layout: Layout
) -> None:
    layout.write(tmp_path / "in")
    unpacked = prepared(tmp_path / "in", tmp_path / "out", layout.settings)
    for number, suffix in enumerate((".zip", ".tar", ".tar.gz")):
        archive = pack(tmp_path / "in", tmp_path / f"corpus{suffix}", top="corpus" * (number % 2))
        lines: list[str] = []
        out = tmp_path / f"out{suffix}"
        prepare_dataset([archive], out, layout.settings, note=lines.append)
        assert files_of(out) == unpacked, suffix
        assert any(layout.printed in line for line in lines), lines


@pytest.mark.parametrize("suffix", ARCHIVE_SUFFIXES)
def test_every_kind_of_archive_is_read(tmp_path: Path, suffix: str) -> None:
    lines = '{"text": "one"}\n{"text": "two"}\n'
    files = {"train/a": lines, "test/é.txt": "zwei é", "test/.hidden": "no"}
    archive = pack(write_files(tmp_path / "in", files), tmp_path / f"c{suffix}", top="c")
    assert prepared(archive, tmp_path / "1") == prepared(tmp_path / "in", tmp_path / "2")
    for number, address in enumerate(("test", "t*t/*.txt", "train/a")):
        chosen = prepared(f"{archive}/{address}", tmp_path / f"3-{number}")
        assert chosen == prepared(tmp_path / "in" / address, tmp_path / f"4-{number}")
    with pytest.raises(DataError, match=r"no such file in the archive. It has: "):
        find(f"{archive}/other", tmp_path)


def test_the_only_file_of_an_archive_is_read_like_a_file(tmp_path: Path) -> None:
    text = random.Random(0).randbytes(3000).hex()[:4000] + "é" * 500
    archive = pack(write_files(tmp_path / "in", {"enwik8": text}), tmp_path / "enwik8.zip")
    settings = PrepareSettings(recipe="enwik8")
    unpacked = prepared(tmp_path / "in" / "enwik8", tmp_path / "1", settings)
    assert prepared(archive, tmp_path / "2", settings) == unpacked
    tokens = [open_split(tmp_path / "2", split).num_tokens for split in ("train", "valid", "test")]
    assert tokens == [4500, 250, 250], "the bytes of the recipe's splits"


def names_in_tar(*names: str, folders: tuple[str, ...] = ()) -> bytes:
    entries = (member(folder, b"", type=tarfile.DIRTYPE) for folder in folders)
    return tar_of(*entries, *(member(name, b"{}") for name in names))


LM1B = ("c/training-monolingual/news.en-00001-of-00100", "c/training-monolingual/news.en-00002")
SAMPLES = {
    "pairs": names_in_tar("0.jpg", "0.txt", "1.jpg", "1.txt"),
    "pairs without a text": names_in_tar("a/0.jpg", "a/0.cls", "a/1.jpg", "a/1.cls"),
    "texts": names_in_tar("0.txt", "1.txt"),
    "texts in folders": names_in_tar("a/0.json", "b/1.json"),
    "one split": names_in_tar("train/0.txt", "train/1.txt"),
    "pairs with two texts": names_in_tar(
        "0.de.txt", "0.jpg", "0.txt", "1.de.txt", "1.jpg", "1.txt"
    ),
    "labels of a few, and one pair of texts": names_in_tar(
        "0.cls", "0.txt", "1.txt", "2.orig.txt", "2.txt"
    ),
    "pairs in the folder .": names_in_tar(
        "./0.jpg", "./0.txt", "./1.jpg", "./1.txt", folders=(".",)
    ),
}
FOLDERS = {
    "lm1b": names_in_tar(*LM1B, "c/heldout-monolingual/news.en.heldout-00000-of-00050"),
    "ptb": names_in_tar("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
    "splits by file": names_in_tar("train.txt", "valid.txt"),
    "splits by folder": names_in_tar("train/0.txt", "valid/0.txt"),
    "packed folder": names_in_tar("books/a.txt", "books/b.txt", folders=("books",)),
    "texts in two languages": names_in_tar("0.txt", "1.txt", "2.de.txt", "2.txt"),
    "all texts in two languages": names_in_tar("0.de.txt", "0.txt", "1.de.txt", "1.txt"),
    "packed from .": names_in_tar("./books/a.txt", "./books/b.txt", folders=(".", "./books")),
    "source code": names_in_tar("p/a.py", "p/a.md", "p/b.py", "p/c.py", "p/d.py"),
}


@pytest.mark.parametrize("name", [*SAMPLES, *FOLDERS])
def test_a_tar_is_samples_or_a_folder_by_the_names_of_its_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "in.tar"
    path.write_bytes((SAMPLES | FOLDERS)[name])

    def kinds(address: Path | str, format: str = "auto") -> set[str]:
        return {*kinds_of(find(address, tmp_path, format))}

    assert (kinds(path) == {"tar"}) == (name in SAMPLES)
    assert kinds(path, "tar") == {"tar"}
    assert "tar" not in kinds(f"{path}/**"), "an address inside always means the folder"
    with pytest.raises(DataError, match="no text matches this"):
        kinds(f"{path}/**", "tar")
    assert kinds(path, "text") == {"text"}


# --- compressed texts -----------------------------------------------------------------------------


def test_a_bomb_and_a_dictionary_of_any_size_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.system.sources.MIN_BYTES", 2**20)
    path = tmp_path / "a.txt.bz2"
    path.write_bytes(bz2.compress(b"x" * 2**23))
    assert "refused as a decompression bomb" in only_reject(path).reason
    path = tmp_path / "a.txt.xz"
    raw = bytearray(lzma.compress(b"text"))
    header = slice(12, 12 + 4 * (raw[12] + 1) - 4)  # of the block, without its checksum
    at = raw.index(b"\x21\x01", header.start) + 2
    raw[at] = 2 * (28 - 12)  # a dictionary of 2**28 bytes
    raw[header.stop : header.stop + 4] = struct.pack("<I", zlib.crc32(raw[header]))
    path.write_bytes(raw)
    assert "damaged xz stream: Memory usage limit exceeded" in only_reject(path).reason
    archive = pack(write_files(tmp_path / "in", {"a": b"x" * 2**23}), tmp_path / "in.zip")
    monkeypatch.setattr("data_pipeline.system.sources.MAX_RATIO", 100)
    with pytest.raises(DataError, match=r"in\.zip: it expands to .* decompression bomb"):
        find(archive, tmp_path)


# --- damaged and hostile archives -----------------------------------------------------------------


def in_zip(name: str, content: bytes = b"text", *, mode: int = 0, method: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        info = zipfile.ZipInfo(name)
        info.external_attr, info.compress_type = mode << 16, method
        packed.writestr(info, content)
    return file.getvalue()


def encrypted(content: bytes) -> bytes:
    """With the flag of encryption in both headers."""
    raw = bytearray(content)
    for mark, offset in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        raw[raw.index(mark) + offset] |= 1
    return bytes(raw)


def with_wrong_size(content: bytes) -> bytes:
    """With a size in the central directory that is not that of the member."""
    raw = bytearray(content)
    entry = raw.index(b"PK\1\2")
    raw[entry + 24 : entry + 28] = struct.pack("<I", 40)
    return bytes(raw)


def in_tar(name: str, content: bytes = b"text", **fields: object) -> bytes:
    return tar_of(member("sub/a.en.1", b"text"), member(name, content, **fields))


def in_zips(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name that occurs twice
        for name in names:
            packed.writestr(name, name)
    return file.getvalue()


HOSTILE = {
    "parent.zip": (lambda: in_zip("../a.txt"), r"\.\./a\.txt is a path that leaves the archive"),
    "inner.zip": (lambda: in_zip("a/../../b.txt"), "is a path that leaves the archive"),
    "absolute.zip": (lambda: in_zip("/etc/passwd"), "/etc/passwd is a path that leaves"),
    "backslash.zip": (lambda: in_zip("..\\a.txt"), "is a path that leaves the archive"),
    "nul.zip": (lambda: in_zip("a.txt").replace(b"a.txt", b"a\0txt"), "is a path that is not a n"),
    "link.zip": (lambda: in_zip("a.txt", mode=0o120777), "a.txt is a link or a device"),
    "encrypted.zip": (lambda: encrypted(in_zip("a.txt")), "member a.txt is encrypted"),
    "lzma.zip": (lambda: in_zip("a.txt", method=14), "of method 14; only deflate is read"),
    "nested.zip": (lambda: in_zip("a.tar.gz"), r"it holds the archive a\.tar\.gz"),
    "twice.zip": (lambda: in_zips("a.txt", "a.txt"), "its member a.txt occurs twice"),
    "file and folder.zip": (lambda: in_zips("a", "a/b"), "its member a/b occurs twice"),
    "wrong size.zip": (
        lambda: with_wrong_size(in_zip("a.txt", b"text " * 100, method=8)),
        r"Bad CRC-32 for file 'a\.txt'",
    ),
    "empty.zip": (lambda: b"", "File is not a zip file"),
    "no text.zip": (lambda: in_zip("a.jpg"), r"no text in it \(ignored: 1 \.jpg\)"),
    "parent.tar": (lambda: in_tar("../a.en.2"), r"\.\./a\.en\.2 is a path that leaves"),
    "nested.tar.gz": (lambda: gzip.compress(in_tar("b.zip")), r"it holds the archive b\.zip"),
    "link.tar": (
        lambda: in_tar("b.en.2", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        r"member b\.en\.2 is a link or a device",
    ),
}  # fmt: skip


@pytest.mark.fault_row(21)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE[name]
    path = write_files(tmp_path / "in", {name: content()}) / name
    with pytest.raises(DataError, match=f"{name}: .*{reason}") as error:
        prepare_dataset([path], tmp_path / "out", BYTES)
    assert error.value.exit_code == 3
    assert [each.name for each in tmp_path.rglob("*")] == ["in", name]


@pytest.mark.fault_row(21)
@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tar.gz"])
def test_an_archive_cut_or_damaged_anywhere_is_refused_or_read_completely(
    tmp_path: Path, suffix: str
) -> None:
    rng = random.Random(1)
    files = {name: rng.randbytes(300).hex() for name in ("train/a.en", "train/b.en", "valid")}
    archive = pack(write_files(tmp_path / "in", files), tmp_path / f"c{suffix}")
    whole = archive.read_bytes()

    def documents() -> list[str] | None:
        """The texts of the archive; None if it is refused."""
        try:
            files = find(archive, tmp_path).files
            records = [record for file in files for record in read(file)]
        except (DataError, ConfigError):
            return None
        return None if rejects(records) else sorted(texts(records))

    expected = documents()
    assert expected
    assert len(expected) == 3
    end = len(whole.rstrip(b"\0")) if suffix == ".tar" else len(whole)
    for size in range(0, end, 89):
        archive.write_bytes(whole[:size])
        assert documents() is None, size
    if suffix != ".tar":  # has no checksum of contents
        for at in range(0, len(whole), 37):
            archive.write_bytes(whole[:at] + bytes([whole[at] ^ 0x24]) + whole[at + 1 :])
            found = documents()
            # Names and times have no checksum. A byte of text is never wrong or missing silently.
            assert found is None or len(found) < 3 or found == expected, at


# --- the folder in which an archive is unpacked ---------------------------------------------------


def test_what_was_unpacked_is_removed_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    write_files(tmp_path / "in", {f"{n}.en": f"text {n}" * 50 for n in range(30)})
    archive, out = pack(tmp_path / "in", tmp_path / "c.tar.gz"), tmp_path / "out"
    settings = PrepareSettings(shard_bytes=2000)
    stop_after(5, archive, out, 2**26, settings=settings)
    assert [path.name for path in out.iterdir()] == [STAGING]
    (out / UNPACKED / "0").mkdir(parents=True)  # as a killed run leaves it
    with pytest.raises(DataError, match="no such file or folder"):
        prepare_dataset([tmp_path / "typo.tar.gz"], out, settings)
    assert [path.name for path in out.iterdir()] == [STAGING], "bad input costs no finished work"
    assert prepare_dataset([archive], out, settings).reused_units == 5
    assert files_of(out) == prepared(tmp_path / "in", tmp_path / "2", settings)


def test_a_full_disk_while_an_archive_is_unpacked_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(write_files(tmp_path / "in", {"a.en": "text"}), tmp_path / "c.zip")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UnfinishedError, match=r"unpacking failed: No space left on device"):
        find(archive, tmp_path)


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tar.gz"])
def test_an_archive_at_a_url_gives_the_same_dataset(
    tmp_path: Path, bucket: Any, suffix: str
) -> None:
    files = {name: f"text of {name}" for name in ("train/a.en", "train/b.en", "test/c.en")}
    archive = pack(write_files(tmp_path / "in", files), tmp_path / f"c{suffix}")
    bucket.pipe(f"bucket/{archive.name}", archive.read_bytes())
    remote = prepared(f"s3://bucket/{archive.name}", tmp_path / "1")
    assert remote == prepared(tmp_path / "in", tmp_path / "2")
