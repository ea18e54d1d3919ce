"""Tests that need a GPU: `make gpu`. Without one they are skipped. They repeat, on a GPU, what the
other tests prove on CPUs."""
