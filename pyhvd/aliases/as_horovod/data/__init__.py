"""``horovod.data``: loaders of batches."""

from horovod.data.data_loader_base import (
    AsyncDataLoaderMixin as AsyncDataLoaderMixin,
    BaseDataLoader as BaseDataLoader,
)
