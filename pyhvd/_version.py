"""The version of pyhvd; it imports nothing, so that every module may."""

__version__ = "0.1.0"
