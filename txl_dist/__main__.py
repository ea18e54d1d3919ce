"""`python -m txl_dist` is `txl`."""

from txl_dist.cli.app import main

main()
