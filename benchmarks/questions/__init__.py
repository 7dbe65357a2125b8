"""The questions: each module holds one ``QUESTION`` and runs by itself."""
