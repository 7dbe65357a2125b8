"""The processes of one job: how they start, find each other, are watched, end, and print."""
