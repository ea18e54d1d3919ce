"""Storage services: atomic files, locks, JSON and manifest files, input streams and URLs.

open_source.py        read a local file or URL, decompressed (uses urls.py, source_errors.py)
remote_path.py        a dataset directory at a URL, with the interface of pathlib.Path
atomic_files.py       write one file atomically
direct_file.py        write a large file without the page cache
directories.py        publish or remove a directory by rename
staged_directory.py   publish a set of files together, the manifest last (uses locks.py)
manifest_file.py      JSON with format, version and digest (uses strict_json.py, strict_model.py)
"""
