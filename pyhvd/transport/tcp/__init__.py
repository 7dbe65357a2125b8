"""Move control messages between hosts: an authenticated session without I/O, and its TCP socket."""
