"""Move messages and bytes between ranks: over MPI, shared memory, TCP, and between threads of one process."""
