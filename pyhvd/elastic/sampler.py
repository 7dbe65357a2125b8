"""Which samples a rank processes, so that an epoch goes on exactly where a commit left it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyhvd.api.topology import rank, size


class ElasticSampler:
    """Divides the indices of a dataset among the ranks, whose number may change within an epoch.

    The order depends on `seed` and epoch alone. The ranks take turns: of what is left of an epoch, each takes
    every ``size()``-th index. Pass the sampler to :class:`ObjectState` or
    ``pyhvd.torch.elastic.TorchState``. Call :meth:`record_batch` after each batch, and :meth:`set_epoch`
    at the end of each epoch. Then every index occurs once in the committed batches of an epoch, even if ranks
    fail.

    Each batch but the last of an epoch must have the same size on all ranks.

    Parameters
    ----------
    dataset : sized or int
        The dataset, or its length.
    shuffle : bool
        Whether each epoch has a random order of its own.
    seed : int
        The seed of these orders, the same on every rank.
    pad : bool
        Whether all ranks get equally many indices: then the last indices repeat those that are left, from
        the first on. Without it some ranks get one index less. They call :func:`pyhvd.join` when they have no
        batch any more; all ranks commit after it.

    Attributes
    ----------
    epoch : int
        The number of the epoch.
    processed_num : int
        The number of samples of the epoch that all ranks together have processed. It is exact after a commit.
        After :meth:`record_batch` it assumes that the other ranks have recorded as many samples as this one.
    num_samples, total_size : int
        How many indices this rank and all ranks had when the epoch was last divided.
    remaining_indices : list of int
        The indices, of all ranks, that were left then; without padding. Made anew at each access.
    """

    def __init__(
        self,
        dataset: Sized | int,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - Horovod's
        seed: int = 0,
        pad: bool = True,  # noqa: FBT001, FBT002 - public
    ) -> None:
        self._length = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
        if self._length < 0:
            raise ValueError(f"dataset={dataset!r}: expected a dataset, or a length of 0 or more")
        self.dataset = dataset
        self.shuffle, self.seed, self.pad = shuffle, seed, pad
        self.epoch = 0
        self._counted = 0  # samples of all ranks, at the last commit or load
        self._recorded = 0  # this rank's since
        self._just_loaded = False
        self.reset()

    @property
    def processed_num(self) -> int:
        return min(self._counted + self._recorded * self.num_replicas, self._length)

    @property
    def remaining_indices(self) -> list[int]:
        left: list[int] = self._order()[self._first :].tolist()
        return left

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch.

        Call it at the end of each epoch, before the commit: a restart then does not repeat the epoch. It
        has no effect if the sampler is in the middle of this epoch, or has just been loaded at its end. So it
        may also stand before the first batch of an epoch, where a program comes past it after a restart.
        """
        goes_on = epoch == self.epoch and (self._just_loaded or self.processed_num < self._length)
        self._just_loaded = False
        if goes_on:
            return
        self.epoch = epoch
        self._counted = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's signature
        """Note that this rank has processed `batch_size` samples; `batch_idx` has no effect.

        The next ``commit()`` adds up what all ranks have recorded.
        """
        self._recorded += batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch's number, and how many of its samples are processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler was: divide the rest of its epoch among the present ranks."""
        self.epoch = state_dict["epoch"]
        self._counted = state_dict["processed_num"]
        self._just_loaded = True
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch among the ranks."""
        self.rank, self.num_replicas = rank(), size()
        self._counted = self._first = min(self._counted, self._length)
        self._recorded = 0
        left = self._order()[self._first :]
        if self.pad and len(left):
            left = np.resize(left, -(-len(left) // self.num_replicas) * self.num_replicas)
        self.indices: list[int] = left[self.rank :: self.num_replicas].tolist()
        self.num_samples, self.total_size = len(self.indices), len(left)

    def _order(self) -> NDArray[np.int64]:
        """Return the indices of the whole epoch, in its order."""
        if not self.shuffle:
            return np.arange(self._length)
        return np.random.default_rng((self.seed % 2**64, self.epoch % 2**64)).permutation(self._length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples

    def take_recorded(self) -> int:
        """Return how many samples this rank has recorded since the last commit."""
        return self._recorded

    def add_recorded(self, count: int) -> None:
        """Note what all ranks together have recorded; a commit calls this."""
        self._counted = min(self._counted + count, self._length)
        self._recorded = 0
