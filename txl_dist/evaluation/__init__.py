"""Exact evaluation: the same number for any number of workers and any batch size."""
