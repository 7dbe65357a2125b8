"""Which network interfaces connect the hosts of a job."""
