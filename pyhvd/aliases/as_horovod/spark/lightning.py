"""``horovod.spark.lightning``: not there."""

raise ImportError(
    "pyhvd has no horovod.spark.lightning: its Estimator for torch and numpy models is pyhvd.spark.Estimator,"
    " see docs/spark_estimator.md"
)
