"""The timeline's parts that know nothing of the engine: clocks, files, rows, and what they add up to."""
