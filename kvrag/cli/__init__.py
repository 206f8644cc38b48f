"""The command line. Each command is a module with `add_arguments(parser)` and `run(args) -> exit code`."""
