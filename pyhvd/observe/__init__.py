"""Metrics, timeline, traces and hang reports."""
