"""`txl doctor`: checks of the machines of a run before it is started.

    DoctorRequest -> check_this_machine -> run_checks (threads, time limit) -> Findings
                     the same on every node of a cluster (cluster/doctor.py) -> comparisons

finding.py    what one check found and what to do; runs checks; prints findings
checks.py     what to check, and the checks of one node
"""
