"""WebDatasets as input: samples are documents, and a hostile archive is refused by name."""

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.readers import Reject
from data_pipeline.shards.manifest import PrepareSettings
from tests.data_pipeline.preparation.preparing import Backwards, files_of, texts_of
from tests.data_pipeline.readers.reading import (
    RULES,
    Document,
    Records,
    find,
    kinds_of,
    npy,
    one_file,
    read,
    rejects,
    texts,
)

PADDING = b"\0" * 1024


def member(
    name: str, content: bytes = b"x", *, format: int = tarfile.GNU_FORMAT, **fields: Any
) -> bytes:
    """The blocks of one member."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    header = info.tobuf(format)
    return header + content + b"\0" * (-len(content) % 512)


def archive(*members: bytes) -> bytes:
    return b"".join(members) + PADDING


def keys(records: Records) -> list[str]:
    return [record.key for record in records if isinstance(record, Document)]


GOOD = member("a.txt", b"one"), member("b.txt", "zwei é".encode())


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.zst"])
def test_samples_are_documents_with_their_keys(tmp_path: Path, suffix: str) -> None:
    packed = {".tar": bytes, ".tar.zst": zstandard.compress}.get(suffix, gzip.compress)
    content = archive(
        member("sub/", b"", type=tarfile.DIRTYPE),
        member("./sub/0.jpg", b"\xff" * 700),
        member("./sub/0.json", b'{"text": "not used"}'),
        member("./sub/0.txt", b"one"),
        member("1.json", b'{"text": "two"}\n'),
        member("2.json", b'{"text": "three"}'),
        member("__meta__.json", b"{}"),
        member(".hidden.txt"),
        member("x" * 200 + ".txt", "fünf".encode()),
        member("ü/y.txt", b"six", format=tarfile.PAX_FORMAT),
    )
    path = tmp_path / f"in{suffix}"
    path.write_bytes(packed(content))
    records = read(one_file(path))
    assert texts(records) == ["one", "two", "three", "fünf", "six"]
    assert keys(records) == ["sub/0", "1", "2", "x" * 200, "ü/y"]
    assert [record.line for record in records] == [1, 2, 3, 4, 5]


def test_a_text_is_read_as_in_a_folder(tmp_path: Path) -> None:
    contents = {
        "a": b"\xef\xbb\xbfone",
        "b": b"t\0wo",
        "c": b"\xef\xbb\xbf",
        "d": b"three\xef\xbb\xbf",
    }
    (tmp_path / "in").mkdir()
    for name, content in contents.items():
        (tmp_path / "in" / f"{name}.txt").write_bytes(content)
    members = (member(f"{name}.txt", content) for name, content in contents.items())
    marked = member("e.json", b'\xef\xbb\xbf{"text": "four"}')
    (tmp_path / "in.tar").write_bytes(archive(*members, marked))
    samples = read(one_file(tmp_path / "in.tar"))
    in_folder = [read(file)[0] for file in find(tmp_path / "in").files]
    assert [getattr(each, "text", None) for each in samples] == [
        *(getattr(each, "text", None) for each in in_folder),
        "four",
    ]
    assert "binary: it has a NUL byte" in str(samples[1])


def test_names_with_underscores_are_documents_if_they_have_text(tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    path.write_bytes(
        archive(
            member("__meta__/info.txt", b"webdataset skips this folder"),
            member("__meta__", b"and this file"),
            member("__future__.txt", b"one"),
            member("__hello__.json", b'{"text": "two"}'),
            member("__meta__.json", b'{"created": 1}'),
            member("__init.txt", b"three"),
            member("a__/__b.txt", b"four"),
        )
    )
    records = read(one_file(path))
    assert keys(records) == ["__future__", "__hello__", "__init", "a__/__b"]
    assert texts(records) == ["one", "two", "three", "four"]


def test_the_text_key_selects_the_member(tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    path.write_bytes(
        archive(
            member("a.txt", b"txt"),
            member("a.json", b'{"caption": "json"}'),
            member("a.caption.txt", b"caption"),
        )
    )
    for key, text in (("text", "txt"), ("caption", "json"), ("caption.txt", "caption")):
        assert texts(read(one_file(path), text_key=key)) == [text]
    (reject,) = read(one_file(path), text_key="body")
    assert 'key a: no key "body"; keys seen: caption' in str(reject)


def test_members_of_samples_that_are_not_read_are_counted(tmp_path: Path) -> None:
    names = ("a.de.txt", "a.jpg", "a.txt", "b.jpg", "b.txt", "c.jpg", "d.txt", "__meta__.json")
    (tmp_path / "in.tar").write_bytes(archive(*map(member, names)))
    (tmp_path / "two.tar").write_bytes(archive(member("e.txt"), member("e.jpg")))
    inputs, lines = [tmp_path / "in.tar", tmp_path / "two.tar"], list[str]()
    settings = PrepareSettings(format="tar")
    options = {"max_reject_rate": 0.5, "note": lines.append}
    prepare_dataset(inputs, tmp_path / "out", settings, **options)
    note = "members of samples that are not read (see --text-key): 3 .jpg, 1 .de.txt"
    assert note in lines, "the sample c, which has no text, is a reject"


def test_samples_of_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    path.write_bytes(
        archive(
            member("a.npy", npy(np.array([0, 1, 2]))),
            member("b.json", b'{"ids": [3, 4]}'),
            member("c.tokens.npy", npy(np.array([5], "u1"))),
            member("d.npy", npy(np.array([500]))),
            member("e.npy", npy(np.array([[1]]))),
            member("f.npy", npy(np.array([1.5]))),
        )
    )
    records = read(one_file(path, "ids", RULES))
    assert texts(records[:2]) == ["1 2", "3 4"]
    expected = [
        "key c: no member .ids, .npy, .json",
        "key d: token id 500 at position 0",
        "key e: the array has shape (1, 1)",
        "key f: the array is of float64",
    ]
    for reason, reject in zip(expected, rejects(records), strict=True):
        assert reason in reject.reason
    with_key = read(one_file(path, "ids", RULES), text_key="tokens.npy")
    assert keys(with_key) == ["c"]


BIG = tarfile.TarInfo("big.txt")
BIG.size = 2**60
LINK = "member c.txt is a link or a device, not a file"
BAD_SAMPLES = {
    "parent": (member("../c.txt"), "member ../c.txt is a path that leaves the archive"),
    "inner parent": (member("d/../../c.txt"), "is a path that leaves the archive"),
    "parent in a pax header": (
        member("pax", b"17 path=../c.txt\n", type=tarfile.XHDTYPE) + member("c.txt"),
        "member ../c.txt is a path that leaves the archive",
    ),
    "absolute": (member("/etc/passwd.txt"), "member /etc/passwd.txt is a path that leaves"),
    "symbolic link": (
        member("c.txt", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        LINK,
    ),
    "hard link": (
        member("c.txt", b"", type=tarfile.LNKTYPE, linkname="a.txt"),
        LINK,
    ),
    "device": (member("c.txt", b"", type=tarfile.CHRTYPE), LINK),
    "pipe": (member("c.txt", b"", type=tarfile.FIFOTYPE), LINK),
    "member twice": (member("c.txt") + member("c.txt"), "member c.txt occurs twice"),
    "key twice": (member("a.txt", b"again"), "key a: the key occurs twice"),
    "no text": (member("c.jpg") + member("c.cls"), "no member .text, .txt, .json; its ext"),
    "NUL": (member("c.txt", b"a\0"), "key c: binary: it has a NUL byte"),
    "not UTF-8": (member("c.txt", b"\xff"), "key c: invalid UTF-8"),
    "bad JSON": (member("c.json", b'{"text": '), "key c: broken JSON"),
    "JSON key twice": (member("c.json", b'{"text": "x", "text": "y"}'), 'key "text" twice'),
}  # fmt: skip


@pytest.mark.fault_row(21)
@pytest.mark.parametrize(("bad", "reason"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_a_bad_sample_is_rejected_and_the_others_are_kept(
    tmp_path: Path, bad: bytes, reason: str
) -> None:
    (tmp_path / "in.tar").write_bytes(archive(*GOOD, bad, member("z.txt", b"last")))
    records = read(one_file(tmp_path / "in.tar"))
    (reject,) = rejects(records)
    assert reason in reject.reason
    assert (reject.file, reject.loses_rest) == ("in.tar", False)
    assert keys(records) == ["a", "b", "z"]
    assert [path.name for path in tmp_path.iterdir()] == ["in.tar"], "nothing was written"


def pax(*records: bytes, type: bytes = tarfile.XHDTYPE) -> bytes:
    return member("pax", b"".join(records), type=type)


BAD_ARCHIVES = {
    "empty": (b"", "empty"),
    "not a tar": (b"The grey sea. " * 99, "not a tar archive"),
    "cut inside": (archive(*GOOD)[:-1300], "truncated: it ends without an end mark"),
    "cut between": (b"".join(GOOD), "truncated: it ends without an end mark"),
    "cut header": (b"".join(GOOD) + member("c.txt")[:99], "truncated"),
    "damaged header": (archive(*GOOD, b"\xff" + member("c.txt")[1:]), "damaged header"),
    "two archives": (archive(*GOOD) + archive(*GOOD), "data after its end, such as"),
    "sparse": (archive(*GOOD, member("c.txt", type=tarfile.GNUTYPE_SPARSE)), "c.txt is sparse"),
    "pax sparse": (
        archive(*GOOD, pax(b"22 GNU.sparse.major=1\n"), member("c.txt")),
        "member c.txt is sparse",
    ),
    "huge member": (archive(*GOOD, BIG.tobuf(tarfile.GNU_FORMAT)), "refused as a decompression"),
    "huge header": (
        archive(*GOOD, member("L", b"x" * (2**20 + 1), type=tarfile.GNUTYPE_LONGNAME)),
        "an extended header declares 1,049,088 bytes",
    ),
    "headers of headers": (
        archive(*GOOD, *[member("L", b"x", type=tarfile.GNUTYPE_LONGNAME)] * 1500), "damaged header"
    ),
    "bad pax": (archive(*GOOD, pax(b"99 path=x\n"), member("c.txt")), "damaged extended header"),
    "short pax": (archive(*GOOD, pax(b"8 path=xyz\n"), member("c.txt")), "damaged extended"),
    "pax size": (archive(*GOOD, pax(b"11 size=-1\n"), member("c.txt")), "size -1: unsupported"),
    "global path": (
        archive(*GOOD, pax(b"10 path=x\n", type=tarfile.XGLTYPE), member("c.txt")),
        "a global header sets the path",
    ),
    "dangling pax": (archive(*GOOD, pax(b"10 path=x\n")), "damaged header"),
    "link with data": (
        archive(*GOOD, member("c.txt", b"data", type=tarfile.SYMTYPE)),
        "of type b'2' and size 4: unsupported",
    ),
    "unknown type": (archive(*GOOD, member("c.txt", type=b"Q")), "of type b'Q' and size 1"),
}  # fmt: skip


@pytest.mark.fault_row(21)
@pytest.mark.parametrize(("content", "reason"), BAD_ARCHIVES.values(), ids=BAD_ARCHIVES)
def test_a_hostile_archive_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "in.tar").write_bytes(content)
    records = read(one_file(tmp_path / "in.tar"))
    assert isinstance(records[-1], Reject)
    assert reason in records[-1].reason
    assert (records[-1].file, records[-1].loses_rest) == ("in.tar", True)
    assert texts(records[:-1]) in ([], ["one"], ["one", "zwei é"])
    with pytest.raises(DataError, match=r"cannot be read to their end(.|\n)*in\.tar"):
        prepare_dataset([tmp_path / "in.tar"], tmp_path / "out", PrepareSettings())


def test_a_bomb_is_refused_without_being_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.system.sources.MIN_BYTES", 2**20)
    bomb = archive(*GOOD, member("c.bin", b"\0" * 2**22), member("d.txt", b"\0" * 2**22))
    for suffix, pack in ((".zst", zstandard.compress), (".gz", gzip.compress)):
        path = tmp_path / f"in.tar{suffix}"
        path.write_bytes(pack(bomb))
        monkeypatch.setattr("data_pipeline.system.sources.MAX_RATIO", 100)
        *good, reject = read(one_file(path))
        assert "refused as a decompression bomb" in str(reject)
        assert texts(good) == ["one"], "b could have had more members"


def test_a_tar_cut_or_damaged_anywhere_never_raises_or_loses_a_sample_silently(
    tmp_path: Path,
) -> None:
    whole = archive(*GOOD, member("x" * 150 + ".txt", b"three"))
    path = tmp_path / "in.tar"
    for size in range(0, len(whole) - 1023, 101):
        path.write_bytes(whole[:size])
        assert isinstance(read(one_file(path))[-1], Reject), size
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x24]) + whole[at + 1 :])
        records = read(one_file(path))
        assert len(records) >= 3 or isinstance(records[-1], Reject), at


def test_archives_are_read_by_name_or_pattern_and_with_the_format_also_in_folders(
    tmp_path: Path,
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("0.tar", "1.tar"):
        (tmp_path / "in" / name).write_bytes(archive(*GOOD))
    folder, out = tmp_path / "in", tmp_path / "out"
    assert kinds_of(find(folder / "*.tar")) == kinds_of(find(folder, format="tar")) == {"tar": 2}
    assert kinds_of(find(folder / "0.tar")) == {"tar": 1}
    with pytest.raises(DataError, match=r"ignored: 2 \.tar\)"):
        find(folder)
    assert kinds_of(find(folder / "0.tar", format="text", out=out)) == {"text": 2}


def test_the_dataset_has_the_keys_and_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for shard in range(3):
        samples = (
            member(f"{shard}-{n}.json", json.dumps({"text": f"{shard} {n}"}).encode())
            for n in range(7)
        )
        (tmp_path / "in" / f"{shard}.tar").write_bytes(archive(*samples))
    plain = PrepareSettings(format="tar")
    prepare_dataset([tmp_path / "in"], tmp_path / "out", plain)
    expected = {f"{s}.tar:{s}-{n}": f"{s} {n}" for s in range(3) for n in range(7)}
    assert texts_of(tmp_path / "out") == expected
    settings = PrepareSettings(format="tar", split={"valid": 0.3}, shuffle=3, shard_bytes=20)
    prepare_dataset([tmp_path / "in"], tmp_path / "a", settings)
    prepare_dataset([tmp_path / "in"], tmp_path / "b", settings, workers=Backwards())
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert texts_of(tmp_path / "a") | texts_of(tmp_path / "a", "valid") == expected
