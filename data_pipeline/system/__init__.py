"""Services of all packages: files, addresses, strict JSON, signals and worker processes.

files.py         files and directories that appear complete or not at all; locks
sources.py       read local files and URLs, decompressed, with retries; count what is read
remote_path.py   a dataset or run at a URL, with the methods of pathlib.Path
strict.py        JSON, models and manifest files that refuse what they do not know
signals.py       stop signals, and how a process ends
workers.py       units of work in child processes, tasks in a thread
"""
