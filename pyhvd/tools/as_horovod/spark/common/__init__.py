"""``horovod.spark.common``."""
