"""Training: `build.py` builds one rank's part of a run, `loop.py` runs it.

rank.py           the entry of every launcher: one rank from start to exit
build.py          job -> data -> model -> engine -> Trainer
loop.py           the order of events
step.py           one step, in micro-batches; engine/ is DeepSpeed
saving.py         when checkpoints are written and removed
report.py         metrics.jsonl and the step line
resume.py         which checkpoint to resume from; compatibility.py, what may differ
state.py          progress of a run, stored in each checkpoint
phases.py         changes of corpora and weights during a run
"""
