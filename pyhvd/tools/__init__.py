"""What stands on all of pyhvd: the subcommands of ``python -m pyhvd``.

A subcommand is a module with ``main(argv)``, imported only when chosen.
"""
