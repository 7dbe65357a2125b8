"""Helpers that know no rank: processes, stacks, text."""
