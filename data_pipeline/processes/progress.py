"""The callback by which long operations report their progress."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""progress(phase, done_bytes, total_bytes), called often.

Both count only the work of this run. Work that was finished before is in neither of them, so the
total may decrease.
"""
