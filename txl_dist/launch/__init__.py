"""Launchers: start the processes of a run and wait for them."""
