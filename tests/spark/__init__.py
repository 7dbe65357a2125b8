"""Tests on a real Spark cluster: a master and two workers on loopback."""
