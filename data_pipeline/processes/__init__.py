"""Child processes: workers that map a function over units of work and end with their parent.

worker_status.py: what each worker is doing. background_queue.py: jobs in a thread of this process.
"""
