"""Benchmarks of the project: figures with the limit they are to reach, and the machine's own."""
