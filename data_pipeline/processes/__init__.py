"""Child processes: workers that map a function over units of work and end with their parent."""
