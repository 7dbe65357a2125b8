"""Elastic jobs: real ranks that are killed, on this host."""
