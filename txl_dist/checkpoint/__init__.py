"""Checkpoints: stored by parameter and by lane, never by rank, so any number of ranks can resume.

    manifest.py    what a checkpoint contains, as JSON with a hash per file
    snapshot.py    a copy of one rank's tensors, which is written while training goes on
    writer.py      every rank writes its slices; a rename publishes the checkpoint
    reader.py      verifies a checkpoint and reads any slice of it
    directory.py   the checkpoints of a run: names, pointers, locks of readers, removal
    attempts.py    the starts of a run, of which only the newest may change checkpoints
    mirror.py      copies the checkpoints of a run to a URL
    remote.py      the copies at a URL: names, download, removal

Files are safetensors and JSON; nothing is unpickled. Which checkpoint a run may resume from is
decided in `txl_dist/training/resume.py`.
"""
