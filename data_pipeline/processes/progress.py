"""How long work says how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""progress(what, done bytes, total bytes), called often.

Both are of work to be done: what is found finished is in neither, and lowers the total.
"""
