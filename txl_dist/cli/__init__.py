"""The `txl` command line: one module a family of commands; heavy imports stay inside commands."""
