"""Readers: find the input files of a corpus and read documents from them.

    find_files        lists the files and decides the format of each (find.py, kinds.py)
    scan_ranges       cuts a file into byte ranges that can be read independently
    read_records      reads the documents of one range, a Source: a Record or a Reject each
    read_text_chunks  reads the text of one record again

There is one module per format, listed in `formats.py`. To add one: docs/how_to/add_a_reader.md.
"""

from data_pipeline.readers.find import InputFiles, find_files
from data_pipeline.readers.formats import (
    FORMATS,
    Format,
    Kind,
    format_names,
    format_of,
    read_records,
    read_text_chunks,
    scan_ranges,
    text_of_stored,
)
from data_pipeline.readers.input_file import InputFile
from data_pipeline.readers.records import IdRules, Record, Reject
from data_pipeline.readers.source import Source

__all__ = [
    "FORMATS",
    "Format",
    "IdRules",
    "InputFile",
    "InputFiles",
    "Kind",
    "Record",
    "Reject",
    "Source",
    "find_files",
    "format_names",
    "format_of",
    "read_records",
    "read_text_chunks",
    "scan_ranges",
    "text_of_stored",
]
