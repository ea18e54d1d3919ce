"""Child processes: workers that map a function over units of work and end with their parent.

Also background_queue.py: jobs in a thread of this process.
"""
