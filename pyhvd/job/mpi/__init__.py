"""What differs between MPIs when a job starts: flavour, rank variables, PMI-1, abort."""
