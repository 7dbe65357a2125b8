"""``horovod.data``: loaders of batches."""

from .data_loader_base import (
    AsyncDataLoaderMixin as AsyncDataLoaderMixin,
    BaseDataLoader as BaseDataLoader,
)
