"""Starting ranks: ``python -m pyhvd.run`` runs a script under mpiexec, and launches mpiexec outside it."""
