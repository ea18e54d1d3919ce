"""Tracking of a run on a server, which training never waits for.

    training loop -> journal.py: RUN/metrics.jsonl, complete in any case
    process.py    -> starts sender.py, a process; sends it the status at the end
    sender.py     -> which points the server lacks; sends each once, through
                     tracker.py: the interface `Tracker` (start, recorded, log, end)
                     mlflow_tracker.py: MLflow, the only import of mlflow
    txl eval      -> process.py: a score as a run below its training run

`import txl_dist.tracking` imports no module.
"""
