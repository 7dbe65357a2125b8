"""Where MPIs differ when a job starts: mpiexec, rank variables, PMI-1, aborting."""
