"""The example of music: from MIDI files to a MIDI file, by a real MidiTok."""

import json
import re
import subprocess
import sys
from pathlib import Path

import symusic

EXAMPLE = Path(__file__).parents[2] / "examples" / "music.py"


def test_it_continues_a_piece(tmp_path: Path) -> None:
    out = tmp_path / "music"
    command = [sys.executable, str(EXAMPLE), "--out", str(out), "--steps", "16", "--notes", "5"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (score,) = re.findall(r"valid: perplexity ([\d.]+)", ended.stdout)
    assert float(score) < len(json.loads((out / "names.json").read_text())) / 2
    # One document per piece, and no piece in two splits.
    manifest = json.loads((out / "data" / "manifest.json").read_text())
    documents = {name: split["documents"] for name, split in manifest["splits"].items()}
    assert sum(documents.values()) == len(list((out / "midi").glob("*.mid"))) == 40
    (counts,) = re.findall(r"(\d+) notes read, (\d+) drawn", ended.stdout)
    read, drawn = map(int, counts)
    written = symusic.Score(out / "continued.mid")
    assert written.note_num() == read + drawn
    assert 0 <= drawn <= 5


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 200
