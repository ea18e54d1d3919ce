"""Exact evaluation: the same number for any number of workers and any batch size.

spec.py:         what is evaluated: model, split and settings; `evaluation_spec` builds it
scoring.py:      split -> chunks with context -> the LossSums of each, several chunks per batch
batches.py:     batches of chunks, how a worker scores one, and the file of finished ones
distributed.py: all batches on any workers, for several models and splits; sweeps
result.py:      the schema of a result, the line to quote, the words of the text
scores.py:      the sums, also those of a training step; every score with its label and format
breakdown.py:   loss by position, token and document (--details), and intervals
"""
