"""The errors of ``pyhvd.ray``."""

from __future__ import annotations

from pyhvd.job import errors as job_errors


class RayError(job_errors.LaunchError):
    """The ranks cannot start on Ray, or they have ended; the text names the remedy."""


class StartTimeoutError(job_errors.StartTimeoutError, RayError, TimeoutError):
    """Ray did not give the resources in time, or actors did not start in time."""
