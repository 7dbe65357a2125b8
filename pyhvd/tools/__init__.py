"""The subcommands of ``python -m pyhvd``: each a module with ``main(argv)``, imported only when chosen."""
