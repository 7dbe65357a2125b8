"""What runs in and beside each rank of a program: its entry, its supervisor, the script, the socket."""
