"""Processes: workers that map a function over units of work, and their progress."""
