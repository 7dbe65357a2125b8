"""One job's processes: starting, wiring, watching, ending and printing them."""
