"""``horovod.spark.common.backend``: not there."""

raise ImportError(
    "pyhvd has no horovod.spark.common.backend: the number of ranks is given to"
    " pyhvd.spark.Estimator(num_proc=) or pyhvd.spark.run(num_proc=), see docs/spark_estimator.md"
)
