"""Benchmarks of speed and size. Each figure has a limit, or the machine's peak to compare with."""
