"""Scan units read the input once: they locate and hash every document, and copy its text.

A scan holds no text: location, size and sha256 of every document, about 60 bytes per document on
disk. The texts are in a file next to it, from which they are read for the vocabulary and the
shards. Lines of a scan count from the start of a range.

`InputIndex` joins the scans in input order. It has 48 bytes per document, so an input larger than
RAM can be deduplicated, split and shuffled in one process.
"""

import hashlib
import itertools
import json
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save

from data_pipeline.errors import DataError, printable
from data_pipeline.preparation.documents import TEXT_HASH_BYTES, Documents, document_id
from data_pipeline.readers import InputFile, Reject, Source, read_records, scan_ranges
from data_pipeline.shards.manifest import InputSummary

UNIT_BYTES = 64 * 2**20
MAX_RANGES_PER_UNIT = 4096
"""Maximum number of file ranges per unit. Limits the size of a unit of many small files."""
MAX_REJECTS = 1_000_000
"""Maximum number of rejects per unit. A reject takes up to 1 kB of RAM."""
MAX_SHOWN_REJECTS = 5
RULES = 2
"""To be raised when the same files are read as other documents."""
MAX_EXTENSIONS = 20
"""Of unread members that a unit reports, the most frequent ones."""
_ROWS_PER_UPDATE = 8192
"""Records whose contribution to the digest is held in RAM."""
DOCUMENT, EMPTY, REJECT = 0, 1, 2
RECORD = np.dtype(
    [
        ("range_index", "<u4"),  # the unit's file range that contains the record
        ("kind", "u1"),  # DOCUMENT, EMPTY or REJECT; for a reject, the fields below are 0
        ("offset", "<u8"),  # of the text in the file of texts
        ("line", "<u8"),
        ("text_bytes", "<u8"),  # UTF-8 bytes of the text
        ("text_sha256", "u1", 32),
    ]
)
_ROW = struct.Struct("<IB3Q32s")  # the same layout, without padding


class FileRange(NamedTuple):
    """The bytes [start, stop) of one file. `number` is the position of the file in the input."""

    number: int
    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ScanUnit:
    """File ranges that one worker scans."""

    number: int
    ranges: tuple[FileRange, ...]
    text_key: str

    @property
    def name(self) -> str:
        return f"input-{self.number:06d}.scan"  # the dot keeps it distinct from shard names

    @property
    def size(self) -> int:
        return sum(each.stop - each.start for each in self.ranges)

    @property
    def key(self) -> str:
        """Digest of everything that determines the result, except the content of the files."""
        ranges = [
            (number, file.name, file.kind, file.keeps_nul, start, stop)
            for number, file, start, stop in self.ranges
        ]
        # So that a scan with other fields, or by other rules of reading, is not reused.
        content = json.dumps([_ROW.format, RULES, self.text_key, ranges])
        return hashlib.sha256(content.encode()).hexdigest()

    def __str__(self) -> str:
        first = self.ranges[0]
        return printable(f"{self.name}, from byte {first.start:,} of {first.file.name} on")


@dataclass(frozen=True, slots=True, eq=False)
class ScanResult:
    """The N records of a unit in input order, R of them rejects. The unit has F file ranges."""

    records: np.ndarray  # RECORD [N]
    range_lines: np.ndarray  # int64 [F]: number of lines in each file range
    rejects: tuple[Reject, ...]  # [R]
    keys: tuple[str, ...] = ()  # [N] `Record.key`, "" for rejects; () if there are none
    unread: Counter[str] = field(default_factory=Counter)  # `Source.unread`; not in the file

    def to_bytes(self) -> bytes:
        rejects = [astuple(reject) for reject in self.rejects]
        texts = np.frombuffer(json.dumps([rejects, self.keys]).encode(), dtype=np.uint8)
        return save(
            {
                "records": self.records.view(np.uint8),
                "range_lines": self.range_lines,
                "texts": texts,
            }
        )

    @classmethod
    def load(cls, path: Path) -> "ScanResult":
        """Load a scan. `output.py` has checked its sha256."""
        arrays = load_file(path)
        rejects, keys = json.loads(arrays["texts"].tobytes())
        return cls(
            records=arrays["records"].view(RECORD),
            range_lines=arrays["range_lines"],
            rejects=tuple(Reject(*fields) for fields in rejects),
            keys=tuple(keys),
        )


def plan_scan(files: list[InputFile], text_key: str) -> list[ScanUnit]:
    """Divide the input into units of about UNIT_BYTES: ranges of large files, groups of small."""
    groups: list[list[FileRange]] = []
    room = 0
    for number, file in enumerate(files):
        for start, stop in scan_ranges(file, UNIT_BYTES):
            size = stop - start
            if not groups or size > room or len(groups[-1]) == MAX_RANGES_PER_UNIT:
                groups.append([])
                room = UNIT_BYTES
            groups[-1].append(FileRange(number, file, start, stop))
            room -= size
    return [ScanUnit(number, tuple(ranges), text_key) for number, ranges in enumerate(groups)]


def scan(unit: ScanUnit, texts: BinaryIO) -> ScanResult:
    """Read a unit and write the texts of its documents to `texts`, which is empty.

    Records that cannot be used become rejects. Raises UnfinishedError when a disk or server fails
    temporarily, and DataError for a changed file and for more than MAX_REJECTS rejects: such an
    input has another format.
    """
    has_keys = any(each.file.kind == "tar" for each in unit.ranges)
    rows = bytearray()  # packed, because there may be millions
    range_lines: list[int] = []
    rejects: list[Reject] = []
    keys: list[str] = []
    unread = Counter[str]()
    for number, (_, file, start, stop) in enumerate(unit.ranges):
        source = Source(file, unit.text_key, start, stop, texts, unread=unread)
        last_line = 0
        for record in read_records(source):
            last_line = record.line
            if has_keys:
                keys.append("" if isinstance(record, Reject) else record.key)
            if isinstance(record, Reject):
                rejects.append(record)
                rows += _ROW.pack(number, REJECT, 0, 0, 0, b"")
            else:
                kind = DOCUMENT if record.size else EMPTY
                rows += _ROW.pack(
                    number, kind, record.offset, record.line, record.size, record.sha256
                )
            if len(rejects) > MAX_REJECTS:
                last = "".join(f"\n  {reject}" for reject in rejects[-MAX_SHOWN_REJECTS:])
                raise DataError(
                    f"{printable(file.name)}: more than {MAX_REJECTS:,} records cannot be used; "
                    f"the file is probably not {file.kind}.{last}\nNo dataset was written. Set its "
                    "format with --format, or remove the file from the input."
                )
        # `source.lines` is 0 after a read error. The line numbers of the next range must still
        # differ from those of this range, because document ids are made of them.
        range_lines.append(source.lines or last_line)
    return ScanResult(
        records=np.frombuffer(rows, RECORD),
        range_lines=np.array(range_lines, dtype=np.int64),
        rejects=tuple(rejects),
        keys=tuple(keys),
        unread=unread,
    )


class InputIndex:
    """The documents with text, numbered in input order, and counts of everything else."""

    def __init__(
        self,
        files: list[InputFile],
        units: Sequence[ScanUnit],
        scans: Iterable[ScanResult],
        reject_list: BinaryIO,
    ) -> None:
        """`scans` are the results of `units`, in order.

        Rejects are written to `reject_list`, as the lines of `rejects.jsonl`.
        """
        self.files = files
        self.empty = self.rejected = 0
        self.duplicates = 0  # set by `first_of_each_text`
        self.first_rejects: list[Reject] = []  # at most MAX_SHOWN_REJECTS
        self.broken: dict[str, Reject] = {}  # by file, the first that loses the rest of the file
        self._reject_list = reject_list
        self._digest = hashlib.sha256()
        if any(splits := [file.split for file in files]):
            self._digest.update(json.dumps(splits).encode())
        file_lines = np.zeros(len(files), np.uint64)
        parts = [
            self._add_scan(unit, scan, file_lines) for unit, scan in zip(units, scans, strict=True)
        ]
        self.documents = Documents.joined([file.name for file in files], parts)
        self.num_documents = len(self.documents)  # also after the only one is cut

    def summary(self) -> InputSummary:
        """Counts, and a digest of given splits, of ids and texts of documents, and of rejects."""
        return InputSummary(
            digest=self._digest.hexdigest(),
            files=len(self.files),
            documents=self.num_documents,
            empty=self.empty,
            rejected=self.rejected,
            duplicates=self.duplicates,
        )

    def _add_scan(self, unit: ScanUnit, scan: ScanResult, file_lines: np.ndarray) -> Documents:
        """The documents of one unit, without the names of the files.

        `file_lines` is uint64 [files], the lines of each file in earlier units; it is updated.
        """
        file_of_range = np.array([each.number for each in unit.ranges], np.uint32)
        lines_before = file_lines[file_of_range]
        # A file has one range in a unit.
        file_lines[file_of_range] += scan.range_lines.astype(np.uint64)
        records = scan.records
        file, shift = file_of_range[records["range_index"]], lines_before[records["range_index"]]
        lines = records["line"] + np.where(records["line"] > 0, shift, 0).astype(np.uint64)
        self._update_digest(scan, file, lines, shift)
        self.empty += int((records["kind"] == EMPTY).sum())
        is_document = records["kind"] == DOCUMENT
        return Documents(
            (),
            file[is_document],
            np.full(int(is_document.sum()), unit.number, np.uint32),
            records["offset"][is_document],
            lines[is_document],
            records["text_bytes"][is_document],
            records["text_sha256"][is_document, :TEXT_HASH_BYTES],
            tuple(itertools.compress(scan.keys, is_document.tolist())),
        )

    def _update_digest(
        self, scan: ScanResult, file: np.ndarray, lines: np.ndarray, shift: np.ndarray
    ) -> None:
        rejects = iter(scan.rejects)
        keys = iter(scan.keys or itertools.repeat(""))
        for start in range(0, len(file), _ROWS_PER_UPDATE):
            rows = slice(start, start + _ROWS_PER_UPDATE)
            columns = (scan.records["kind"][rows], file[rows], lines[rows], shift[rows])
            sha256 = np.ascontiguousarray(scan.records["text_sha256"][rows]).view("V32")[:, 0]
            values = zip(*(column.tolist() for column in (*columns, sha256)), strict=True)
            content = []
            # `values` first: zip must not take a key after the last value.
            for (kind, number, line, lines_before, digest), key in zip(values, keys, strict=False):
                if kind == REJECT:
                    reject = next(rejects)
                    if reject.line:
                        reject = replace(reject, line=reject.line + lines_before)
                    line_of_list = reject.to_json().encode() + b"\n"
                    content.append(b"rejected\0" + line_of_list)
                    self._reject_list.write(line_of_list)
                    self.rejected += 1
                    self.first_rejects = [*self.first_rejects, reject][:MAX_SHOWN_REJECTS]
                    if reject.loses_rest:
                        self.broken.setdefault(reject.file, reject)
                else:
                    id_ = document_id(self.files[number].name, line, key).encode()
                    content.append(b"document\0%b\0%b\n" % (id_, digest))
            self._digest.update(b"".join(content))
