"""Training: `rank.py` runs one rank of a run, `loop.py` has its events.

spec.py           config and options of a run, as a launcher sends them; its files, lock, attempts
rank.py           the entry of every launcher: one rank from start to exit; builds the Trainer
start.py          the start of a rank: data, other ranks, lock, attempt; loads a checkpoint
resume.py         where a run resumes: one class, by the table in the docstring of the module
origin.py         the model of `init_from`: its settings and its weights
compatibility.py  which settings and data may differ on a resume
loop.py           the order of events
data.py           the corpora of a run, opened and checked before any rank is started
phases.py         which corpora, weights and lanes are read from where on
batches.py        the batches that a rank reads, copied to its device
step.py           one step, in micro-batches, and the learning rate of each step
compilation.py    layers compiled by torch.compile, and recorded as CUDA graphs
engine/           DeepSpeed behind one interface, and the optimizers
state.py          progress of a run, stored in each checkpoint; decides whether a step has diverged
recovery.py       what follows: stop, skip or rollback, and a file about each event
report.py         what may watch a run, by event; writes metrics, events and step lines
scores.py         the scores of a run; `watch` scores the checkpoints of a run that trains
saving.py         when checkpoints are written and removed
"""
