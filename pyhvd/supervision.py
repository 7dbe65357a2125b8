"""Whether this rank runs under ``python -m pyhvd.run``, which shows why it failed, and ends the job."""

supervised = False
"""Set by the launcher in the rank's process: then nothing else need end the job after a failure."""
