"""Carriers of messages and bytes between ranks."""
