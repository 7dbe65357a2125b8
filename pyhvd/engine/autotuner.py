"""The autotuner of rank 0: measures the knobs that the search proposes, and orders changes of knobs.

Owns the search, the sampler, and the CSV file. Runs on the runtime's thread. Two callers feed the sampler:
the fast path counts its own batches, :meth:`Tuner.count` counts all others.

A *step* of the program ends when a tensor comes for the second time. A sample is a number of steps, and lasts
at least SHORTEST_SAMPLE, so that this thread's own work does not matter. It begins at the end of its first
batch, so that the change of knobs is not part of it. If no tensor ever repeats, a sample is a number of
batches.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import time
from collections.abc import Sequence
from typing import TextIO

import msgspec

from pyhvd.config import Config
from pyhvd.engine.autotune_search import Search
from pyhvd.errors import ConfigError
from pyhvd.native.shared_memory import Sampler
from pyhvd.negotiation.fusion import response_bytes
from pyhvd.negotiation.messages import Response, Tuning

_log = logging.getLogger("pyhvd")

BATCHES_PER_STEP = 1000
"""Batches after which a step ends if no tensor repeats."""

SHORTEST_SAMPLE = 0.02
"""Shortest duration (s) of a sample."""

_KNOBS = Tuning.__struct_fields__
COLUMNS = ("time_s", "sample", "state", *_KNOBS, "bytes", "seconds", "bytes_per_s")


def tuning_of(config: Config) -> Tuning:
    """Return the knobs of the start."""
    return Tuning(*(getattr(config, knob) for knob in _KNOBS))


class SampleLog:
    """The CSV file: one line per sample, written at once, and one line for the result.

    Parameters
    ----------
    path : str
        An existing file is overwritten.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._began = time.monotonic()
        self._samples = 0
        self._file: TextIO | None = None
        try:
            self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115
            self._write(COLUMNS)
        except OSError as exc:
            self.close()
            raise ConfigError(f"PYHVD_AUTOTUNE_LOG={path!r} cannot be written: {exc.strerror}") from None

    def sample(self, state: str, tuning: Tuning, nbytes: int, seconds: float) -> None:
        """Write one sample."""
        self._samples += 1
        self._line(state, tuning, (nbytes, f"{seconds:.6f}", f"{nbytes / seconds:.0f}"))

    def kept(self, tuning: Tuning) -> None:
        """Write the result."""
        self._line("done", tuning, ("", "", ""))

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the rest could not be written; the log says so
                file.close()

    def _line(self, state: str, tuning: Tuning, measured: Sequence[object]) -> None:
        now = f"{time.monotonic() - self._began:.3f}"
        try:
            self._write((now, self._samples, state, *msgspec.structs.astuple(tuning), *measured))
        except OSError as exc:  # a full disk does not end the job
            _log.error("PYHVD_AUTOTUNE_LOG=%r ends here: %s", self._path, exc.strerror)
            self.close()

    def _write(self, cells: Sequence[object]) -> None:
        if self._file is not None:
            csv.writer(self._file, lineterminator="\n").writerow(cells)
            self._file.flush()  # a killed job leaves its samples


def open_log(config: Config, rank: int) -> SampleLog | None:
    """Return the log that this rank writes, or None; raise ConfigError if it cannot be written."""
    return SampleLog(config.autotune_log) if config.autotune and config.autotune_log and rank == 0 else None


class Tuner:
    """The autotuner.

    Parameters
    ----------
    search : Search
        Chooses the knobs.
    steps : int
        Steps of a sample.
    sampler : Sampler
        Measures; the fast path must get it too.
    log : SampleLog or None
        The tuner closes it.
    """

    def __init__(self, search: Search, steps: int, sampler: Sampler, log: SampleLog | None) -> None:
        self._search = search
        self._steps = steps
        self.sampler = sampler
        self._log = log
        self._in_force = search.current
        self._measuring = False
        self._seen: dict[tuple[int, str], int] = {}
        self._start()

    @property
    def done(self) -> bool:
        """Whether the search has ended and its result is in use."""
        return self._search.done and self._in_force == self._search.current

    def count(self, batch: Sequence[Response]) -> None:
        """Count a batch of responses that did not run on the fast path."""
        if not self.sampler.counts() or batch[0].error is not None:
            return
        most = 0
        for response in batch:
            key = (response.process_set, response.request.name)
            self._seen[key] = times = self._seen.get(key, 0) + 1
            most = max(most, times)
        self.sampler.count(sum(map(response_bytes, batch)), most)

    def look(self) -> Tuning | None:
        """Return new knobs for all ranks, or None for no change."""
        if not self._measuring or (sample := self.sampler.read()) is None:
            return None
        self._measuring = False
        nbytes, seconds = sample[0], max(sample[1], 1e-9)
        if self._log is not None:
            self._log.sample(self._search.state, self._in_force, nbytes, seconds)
        self._search.feed(nbytes, seconds)
        if self._search.done:
            self._conclude()
        if self._search.current != self._in_force:
            return self._search.current
        self._start()
        return None

    def applied(self) -> None:
        """Note that the knobs of :meth:`look` are in use."""
        self._in_force = self._search.current
        self._start()

    def close(self) -> None:
        """Close the log; the search may not have ended."""
        if self._log is not None:
            self._log.close()
        if not self._search.done:
            _log.info("autotune: the job ended before the search did (PYHVD_AUTOTUNE_STEPS_PER_SAMPLE)")

    def _start(self) -> None:
        self._seen.clear()
        self._measuring = not self._search.done
        if self._measuring:
            self.sampler.start(self._steps, BATCHES_PER_STEP * self._steps, SHORTEST_SAMPLE)

    def _conclude(self) -> None:
        kept = self._search.current
        how = f"{self._search.gain:.1%} faster than" if self._search.gain else "nothing beats"
        knobs = msgspec.structs.asdict(kept).items()
        texts = [f"PYHVD_{knob.removesuffix('_ms').upper()}={value:.12g}" for knob, value in knobs]
        _log.info("autotune: %s the defaults: %s", how, " ".join(texts))
        if self._log is not None:
            self._log.kept(kept)


def make_tuner(config: Config, size: int, log: SampleLog | None, *, windowed: bool) -> Tuner | None:
    """Return rank 0's tuner, or None if there is nothing to tune.

    Parameters
    ----------
    config : Config
        Rank 0's configuration; knobs that the user gave are not tuned.
    size : int
        Number of ranks.
    windowed : bool
        Whether all ranks share a window: then its chunk size is tuned, else the staging size of MPI.
    log : SampleLog or None
        The tuner closes it; without a tuner this function does.
    """
    elsewhere = "staging_size" if windowed else "chunk_size"
    free = [knob for knob in _KNOBS if knob not in config.given and knob != elsewhere]
    search = Search(tuning_of(config), free, config.autotune_warmup_samples)
    if size > 1 and not search.done:
        return Tuner(search, config.autotune_steps_per_sample, Sampler(), log)
    _log.info("autotune: nothing to tune: %s", "one rank" if size == 1 else "every knob was given")
    if log is not None:
        log.close()
    return None
