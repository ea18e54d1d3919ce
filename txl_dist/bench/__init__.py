"""`txl bench`: what a user measures on a machine. Each figure has a limit, or a peak to compare."""
