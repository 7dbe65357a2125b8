"""``horovod.spark.torch``: not there."""

raise ImportError(
    "pyhvd has no horovod.spark.torch: its Estimator for torch and numpy models is pyhvd.spark.Estimator,"
    " see docs/spark_estimator.md"
)
