"""Starting a job's ranks by Open MPI's mpiexec, with pyhvd's launch agent."""
