"""Helpers that know nothing of ranks: processes, stacks, texts, launcher hooks."""
