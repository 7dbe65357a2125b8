"""Agreement between ranks on what runs next, and in which order; pure: no I/O, no clock, no threads."""
