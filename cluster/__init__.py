"""Training, evaluation and preparation on Ray. No other package imports Ray.

launcher.py           RayLauncher: the entry point for `--on ray` and `--on ADDRESS`
connection.py         connects to a cluster (address.py) or to a private Ray (private_ray.py)
ray_train.py          runs the ranks with Ray Train, in a thread of the launcher
trainer.py            what Ray Train does for the ranks, and what it does not start
rank_worker.py        one rank, inside a Ray worker
supervisor.py         the launcher's main thread: stop signals, status lines, time limits
placement.py          which resources and nodes ranks get
rank_starts.py        when ranks start, how many, and when they end early for a change
rank_plan.py          the number of ranks of an elastic run
rank_monitor.py       where the ranks run, and which have failed
cluster_monitor.py    asks Ray for nodes, free resources and preemptions, for the supervisor
failure_callback.py   called by Ray Train when ranks fail; reports it to the supervisor
failure_counter.py    which failures count, and when there were too many
network.py            the network interface that gloo and NCCL use
doctor.py             checks all nodes before a run (txl doctor)
node_probe.py         the actor of the doctor on one node
exposure.py           whether a cluster can be used without a token
ray_log.py            sends Ray's log to RUN/logs/ray.log
workers.py            the workers of evaluation and preparation, as actors
jobs.py               the client of the Ray Jobs API: the entry point for `txl job`
job_driver.py         runs the txl command of a job on the cluster
job_command.py        the process of that command
drain_node.py         tells Ray that this host will be preempted
deploy/               files for `ray up`, Kubernetes, Slurm and containers
"""
