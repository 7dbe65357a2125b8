"""``horovod.spark.common.estimator``: not there."""

raise ImportError(
    "pyhvd has no horovod.spark.common.estimator: its Estimator for torch and numpy models is"
    " pyhvd.spark.Estimator, see docs/spark_estimator.md"
)
