"""The errors of ``pyhvd.ray``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pyhvd.job import errors as job_errors


class RayError(job_errors.LaunchError):
    """The ranks cannot start on Ray, or they have ended; the text names the remedy."""


class StartTimeoutError(job_errors.StartTimeoutError, RayError, TimeoutError):
    """Ray did not give the resources in time, or actors did not start in time."""


@contextlib.contextmanager
def as_ray_errors() -> Iterator[None]:
    """Raise errors of pyhvd.job as errors of pyhvd.ray, which users catch."""
    try:
        yield
    except RayError:
        raise
    except job_errors.StartTimeoutError as exc:
        raise StartTimeoutError(str(exc), exc.missing) from exc.__cause__
    except job_errors.LaunchError as exc:
        raise RayError(str(exc)) from exc.__cause__
