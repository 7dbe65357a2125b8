"""The questions: each module defines one ``QUESTION``, and runs alone by ``python -m``."""
