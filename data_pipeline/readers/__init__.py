"""Readers: the input files of a corpus, found, opened, and taken apart into documents.

`find_files` lists them, `scan_ranges` says how each may be cut, `read_records` reads a range, and
`read_again` and `read_pieces` take one document again. A file per format, listed in `formats.py`.
"""

from data_pipeline.readers.find import InputFiles, find_files
from data_pipeline.readers.formats import (
    FORMATS,
    Format,
    InputFile,
    Kind,
    Reading,
    read_again,
    read_pieces,
    read_records,
    scan_ranges,
)
from data_pipeline.readers.records import Record, Reject

__all__ = [
    "FORMATS",
    "Format",
    "InputFile",
    "InputFiles",
    "Kind",
    "Reading",
    "Record",
    "Reject",
    "find_files",
    "read_again",
    "read_pieces",
    "read_records",
    "scan_ranges",
]
