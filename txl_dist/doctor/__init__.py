"""`txl doctor`: checks of the machines of a run before it is started.

    DoctorRequest -> node_checks -> run_checks (threads, time limit) -> Findings
                     the same on every node of a cluster (cluster/doctor.py) -> comparisons

finding.py    what one check found and what to do; runs checks; prints findings
checks.py     what to check, and the checks of one node: versions, devices, files, servers
exposure.py   who can use Ray here: dashboards, tokens
"""
