"""Training: `setup.py` builds one rank's part of a run, `loop.py` runs it.

job.py            config and options of a run, as a launcher sends them; equal on all ranks
rank.py           the entry of every launcher: one rank from start to exit
inputs.py         config, data and ranks of a start, checked
setup.py          inputs -> attempt -> point -> parts -> Trainer
computation.py    the step with model and engine, and the stream of segments
data.py           the corpora of a run, opened and checked before any rank is started
phases.py         changes of corpora and weights during a run
loop.py           the order of events
step.py           one step, in micro-batches
divergence.py     decides whether a step has diverged, before it updates the weights
recovery.py       what follows: stop, skip or rollback
divergence_dump.py  losses and documents of the lanes of a step that has diverged
engine/           DeepSpeed, one module per ZeRO stage
schedule.py       the learning rate of each step
lane_dropout.py   dropout masks as a function of seed, step and lane
evaluator.py      the evaluation of a split during training
state.py          progress of a run, stored in each checkpoint
saving.py         when checkpoints are written and removed
resume.py         which checkpoint to resume from
start_state.py    the state to begin with; counts the tokens that a resume loses
remote_resume.py  downloads the newest checkpoint of a URL before that
compatibility.py  which settings and data may differ on a resume
run_directory.py  the files of a run, and who may write them: lock and attempts
report.py         metrics.jsonl and the step line
goodput.py        productive time and lost time of a run, through restarts
stragglers.py     the slowest rank, and what it is slow in
utilisation.py    the MFU: FLOP/s of the run divided by the peak FLOP/s of the machine
follow.py         passes the log of rank 0 on to the launcher
"""
