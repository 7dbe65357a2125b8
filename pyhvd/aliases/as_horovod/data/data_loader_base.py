"""``horovod.data.data_loader_base``: a base of loaders, and a mixin that reads batches ahead.

Unlike Horovod's, an iteration that the program leaves has no effect on the next one: each has its own thread,
which ends with it, and reads nothing of the next epoch.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any

_END = object()


class BaseDataLoader:
    """Base of loaders: a subclass has ``_iterate()``, and ``__len__()`` if it knows its number of batches."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise TypeError(f"{type(self).__name__} has no __len__()")  # list() then does without

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _iterate(self) -> Iterator[Any]:
        """Yield batches as they are read."""
        raise NotImplementedError(f"{type(self).__name__} has no _iterate()")

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch that the program gets; called on the program's thread."""
        return batch


class AsyncDataLoaderMixin:
    """Reads batches in a thread, ahead of the program; a base before that of the loader.

    Parameters
    ----------
    async_loader_queue_size : int
        How many batches the thread reads ahead, at most; 0: no thread.
    *args, **kwargs
        Of the loader's own base.
    """

    def __init__(self, async_loader_queue_size: int = 5, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self._readers: weakref.WeakSet[_ReaderAhead] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; an error of ``_iterate()`` is raised here, after those that it has yielded."""
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        reader = _ReaderAhead(self._iterate(), self.async_loader_queue_size)  # type: ignore[attr-defined]
        self._readers.add(reader)
        with contextlib.closing(reader):
            for batch in reader:
                yield self._process_batch(batch)  # type: ignore[attr-defined]

    def close_async_loader(self) -> None:
        """End the present iterations: each yields what it has read already, and no more."""
        for reader in list(self._readers):
            reader.close()


class _ReaderAhead:
    """A thread that reads batches until one too many waits for the program.

    Every batch in the queue has taken one of ``_room``; ``close()`` gives one more, after it has set
    ``_closed``, so that the thread sees that.
    """

    def __init__(self, batches: Iterator[Any], most: int) -> None:
        self._batches = batches
        self._read: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._room = threading.Semaphore(most)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pyhvd-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch, error = self._read.get()
            if error is not None:
                raise error
            if batch is _END:
                return
            self._room.release()
            yield batch

    def close(self) -> None:
        """End the thread, when it has read the batch at which it is."""
        self._closed = True
        self._room.release()
        if threading.current_thread() is not self._thread:  # which may collect an iteration that nobody has
            self._thread.join()

    def _run(self) -> None:
        error = None
        try:
            for batch in self._batches:
                self._room.acquire()
                if self._closed:
                    break
                self._read.put((batch, None))
        except BaseException as exc:
            error = exc
        finally:
            if isinstance(self._batches, Generator):  # close what it has opened, on the thread that did
                self._batches.close()
        self._read.put((_END, error))
