"""Starting a job's ranks with Open MPI's mpiexec and pyhvd's launch agent; Open MPI's settings."""
