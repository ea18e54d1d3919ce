"""Training, evaluation and preparation on Ray. No other package imports Ray.

launcher.py      RayLauncher: the entry point for `--on ray` and `--on ADDRESS`; its workers
connection.py    connects to a running cluster, or to a private Ray
rank_group.py    the ranks of a run as actors, for the supervisor (txl_dist/launch/supervise.py)
nodes.py         what ranks reserve, which nodes are alive and free; checks them (txl doctor)
jobs.py          txl commands as jobs of Ray's Jobs API, for `txl job`
drain_node.py    tells Ray that this host will be preempted
deploy/          files for `ray up`, Kubernetes, Slurm and containers
"""
