"""Messages and bytes over MPI, through mpi4py; imported by init() alone."""
