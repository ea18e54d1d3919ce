"""Exact evaluation: the same number for any number of workers and any batch size.

job.py:      what is evaluated: model, split and settings; `evaluation_job` builds it
chunks.py:   split -> chunks [context_start, start, stop), in whole segments
scoring.py:  chunk -> its LossSums (nats, tokens, bytes), on any worker, several chunks per batch
evaluate.py: plans the chunks, has them scored, adds their sums in the order of the chunks
distributed.py:     the same on any workers, batch by batch, for several models and splits
worker.py:          what a worker does with one batch; batch_scores.py: what it returns
finished_scores.py: the scores of finished batches, from which a stopped evaluation goes on
protocol.py:        the line to quote with a score; scored_text.py: its words and characters
breakdown.py, token_counts.py, bootstrap.py, details.py: loss by position, token and document
sweep.py:           the best memory options on one split, reported on others
loss_sums.py: the sums, also those of a training step; every mean divides once, at the end
"""
