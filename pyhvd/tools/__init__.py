"""What stands on all of pyhvd: the subcommands of ``python -m pyhvd``, and Horovod's module names.

A subcommand is a module with ``main(argv)``, imported only when chosen.
"""
