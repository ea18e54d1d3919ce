"""Readers: find the input files of a corpus and read documents from them.

    find_files    lists the files and decides the format of each (find.py, formats.py)
    scan_ranges   cuts a file into byte ranges that can be read independently
    read_records  reads the documents of one range, a Source: a Record or a Reject each

There is one module per format, listed in `formats.py`. To add one: docs/how_to/add_a_reader.md.
"""

from data_pipeline.readers.find import InputFiles, find_files
from data_pipeline.readers.formats import (
    FORMATS,
    format_names,
    read_records,
    scan_ranges,
)
from data_pipeline.readers.source import IdRules, InputFile, Record, Reject, Source

__all__ = [
    "FORMATS",
    "IdRules",
    "InputFile",
    "InputFiles",
    "Record",
    "Reject",
    "Source",
    "find_files",
    "format_names",
    "read_records",
    "scan_ranges",
]
