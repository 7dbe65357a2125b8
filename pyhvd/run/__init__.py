"""pyhvdrun and ``python -m pyhvd.run``: they start mpiexec, and run a script on each rank under it."""
