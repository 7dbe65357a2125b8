"""``horovod.spark.common.store``: :class:`pyhvd.spark.Store`."""

from pyhvd.spark import Store as Store
