"""Pure machines: they decide which ranks run where, and what ends a job or a generation."""
