"""Training: `setup.py` builds one rank's part of a run, `loop.py` runs it.

job.py            config and options of a run, as a launcher sends them; equal on all ranks
rank.py           the entry of every launcher: one rank from start to exit
setup.py          builds the Trainer in five stages: inputs, attempt, point, parts, trainer
context.py        the inputs, and where a run begins, as data for all that is built
computation.py    the step with model and engine, and evaluation on the ranks
compilation.py    layers compiled by torch.compile
segment_source.py  the segments that a rank reads
data.py           the corpora of a run, opened and checked before any rank is started
loop.py           the order of events
observer.py       what may watch a run, by event
observers.py      the list: report.py (metrics, step lines), goodput.py (events), speed.py,
                  diagnostics.py
step.py           one step, in micro-batches
divergence.py     decides whether a step has diverged, before it updates the weights
recovery.py       what follows: stop, skip or rollback, and a file about each event
engine/           DeepSpeed behind one interface, and the optimizers
schedule.py       the length of a run, and the learning rate of each step
scores.py         the scores of a run, and what an evaluation is waiting for
score_checkpoints.py  evaluation by another process (txl eval --watch)
state.py          progress of a run, stored in each checkpoint; changes of corpora and lanes
saving.py         when checkpoints are written and removed
resume.py         where a run resumes: one class, by the table in the docstring of the module
start_state.py    loads that checkpoint; the state to begin with; counts the tokens that are lost
compatibility.py  which settings and data may differ on a resume
run_directory.py  the files of a run, and who may write them: lock and attempts
tracked.py        what the tracking process is told at the start of a run
"""
