"""The process on each host: it starts ranks, supervises them, and reports to the driver."""
