"""`python -m txl_dist.harness`: the command line of lm-evaluation-harness with model `txl`."""

import sys
from importlib import import_module

from txl_dist.errors import TxlError, print_error


def main() -> None:
    """Run the harness. Our errors end it with a message and their exit code."""
    try:
        import_module("txl_dist.harness.model")  # registers `txl`
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except TxlError as error:
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":  # workers import this module again
    main()
