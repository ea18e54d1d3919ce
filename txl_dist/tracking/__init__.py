"""Tracking that never hurts: a local journal first, and a process of its own that feeds MLflow.

`journal.py` is the file, `tracker.py` training's side, `sender.py` the process, `delivery.py` what
it sends, `points.py` the journal's lines as points, `mlflow_run.py` the run they go into,
`state.py` what the processes tell each other, `mlflow_client.py` the one import of mlflow, and
`evaluation.py` an evaluation as a child run. Importing this package imports none of them.
"""
