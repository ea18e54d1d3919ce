"""The checkpoint: canonical (by parameter and by lane, never by rank), hashed, atomic.

safetensors and JSON only. `manifest.py` says what it holds, `writer.py` and `reader.py` do the
work, `directory.py` knows where checkpoints lie, `compatibility.py` who may resume from one.
"""
