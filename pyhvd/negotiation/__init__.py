"""Agreement between ranks; pure: no I/O, no clock, no threads."""
