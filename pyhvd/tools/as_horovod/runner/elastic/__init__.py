"""``horovod.runner.elastic``."""
