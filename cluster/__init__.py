"""Training, evaluation and preparation on Ray. No other package imports Ray.

launcher.py           RayLauncher: the entry point for `--on ray` and `--on ADDRESS`
connection.py         connects to a cluster (address.py) or to a private Ray (private_ray.py)
ray_train.py          runs the ranks with Ray Train, in a thread of the launcher
supervisor.py         the launcher's main thread: stop signals, status lines, time limits
rank_starts.py        when ranks start, how many, and when they end early for a change
rank_plan.py          the number of ranks of an elastic run
rank_monitor.py       where the ranks run, and which have failed
launch_output.py      what a launch prints
cluster_monitor.py    asks Ray for nodes, free resources and preemptions, for the supervisor
failure_callback.py   called by Ray Train when ranks fail; reports it to the supervisor
failure_counter.py    which failures count, and when there were too many
network.py            the network interface that gloo and NCCL use
ray_log.py            sends Ray's log to RUN/logs/ray.log
evaluation.py         scores a split with actors
preparation.py        prepares and verifies datasets with tasks
deploy/               job scripts for cluster schedulers
"""
