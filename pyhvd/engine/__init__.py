"""One rank's background thread: runtime, executors, context, watchdog and autotuner."""
