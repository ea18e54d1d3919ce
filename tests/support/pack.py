"""Pack a folder as the archives in which corpora are published."""

import io
import tarfile
import zipfile
from pathlib import Path

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def pack(folder: Path, archive: Path, *, top: str = "") -> Path:
    """Write the files of `folder`, in reverse order, below the folder `top` of the archive."""
    names = sorted((p.relative_to(folder) for p in folder.rglob("*")), reverse=True)
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name in names:
                zipped.write(folder / name, Path(top, name))
        return archive
    content = io.BytesIO()
    mode = {".gz": "w:gz", ".tgz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz"}.get(archive.suffix, "w:")
    with tarfile.open(fileobj=content, mode=mode) as packed:
        for name in names:
            packed.add(folder / name, str(Path(top, name)), recursive=False)
    data = content.getvalue()
    if archive.suffix == ".zst":
        import zstandard

        data = zstandard.compress(data)
    archive.write_bytes(data)
    return archive
