"""``horovod.spark``: :func:`pyhvd.spark.run` and :func:`pyhvd.spark.run_elastic`."""

from pyhvd.spark import run as run, run_elastic as run_elastic
