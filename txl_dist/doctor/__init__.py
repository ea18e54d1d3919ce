"""`txl doctor`: checks of the machines of a run before it is started.

    DoctorRequest -> node_checks -> run_checks (threads, time limit) -> Findings
                     the same on every node of a cluster (cluster/doctor.py) -> comparisons

finding.py      Finding: what one check found on one node, and what to do
run.py          runs checks in parallel, each with a time limit
request.py      what to check, and the list of checks of one node
versions.py     versions of libraries and of our code
devices.py      GPUs and their driver, or CPUs
storage.py      the run directory: write, sync, rename, lock; seen by other nodes; free space
dataset.py      the dataset: manifest, files, digest
tracking.py     the MLflow server or database
exposure.py     Ray dashboards that respond without a token, or on all interfaces
comparison.py   differences between nodes: clock, dataset, shared files
connections.py  whether every node can connect to every other
network.py      bandwidth and latency of all-reduce and of pairs of nodes
report.py       a table on a terminal, lines elsewhere, JSON
"""
