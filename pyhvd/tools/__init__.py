"""The subcommands of ``python -m pyhvd``; each is imported only when it is chosen."""
