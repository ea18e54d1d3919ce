"""Training: `rank.py` runs one rank of a run, `loop.py` has its events.

spec.py            config and options of a run, as a launcher sends them; equal on all ranks
rank.py           the entry of every launcher: one rank from start to exit
start.py          the start of a rank: data, other ranks, lock, attempt; loads a checkpoint
resume.py         where a run resumes: one class, by the table in the docstring of the module
origin.py         the model of `init_from`: its settings and its weights
compatibility.py  which settings and data may differ on a resume
build.py          builds the Trainer: step with model and engine, evaluation, observers, tracker
loop.py           the order of events
data.py           the corpora of a run, opened and checked before any rank is started
phases.py         which corpora, weights and lanes are read from where on
batches.py        the batches that a rank reads, copied to its device
step.py           one step, in micro-batches
schedule.py       the learning rate of each step
compilation.py    layers compiled by torch.compile; cuda_graphs.py records them
engine/           DeepSpeed behind one interface, and the optimizers
state.py          progress of a run, stored in each checkpoint; decides whether a step has diverged
recovery.py       what follows: stop, skip or rollback, and a file about each event
report.py         what may watch a run, by event; writes metrics, events and step lines
goodput.py        the wall time of a run by cause
scores.py         the scores of a run, and what an evaluation is waiting for
score_checkpoints.py  evaluation by another process (txl eval --watch)
saving.py         when checkpoints are written and removed
run_directory.py  the files of a run, and who may write them: lock and attempts
"""
