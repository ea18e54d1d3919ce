"""`txl doctor`: checks of the machines of a run before it is started.

On a cluster, cluster/nodes.py runs the checks of checks.py on every node, and compares them.
"""
