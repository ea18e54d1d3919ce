"""Checkpoints: stored by parameter and by lane, never by rank, so any number of ranks can resume.

    checkpoints.py  the order of events: write, publish, copy, remove. Open it first
    manifest.py     what a checkpoint contains, as JSON with a hash per file
    tensors.py      a copy of one rank's tensors, which is written while training goes on;
                    verifies a checkpoint, and reads any slice of it
    directory.py    the checkpoints of a run: names, pointers, locks of readers, removal
    attempts.py     the attempts of a run, of which only the newest may change checkpoints
    copies.py       the copies in object storage: names, download, uploader

Files are safetensors and JSON; nothing is unpickled.
"""
