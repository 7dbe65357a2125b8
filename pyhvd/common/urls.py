"""Paths that are URLs of a file system, as Hadoop, Databricks and fsspec write them. Pure but for /dbfs."""

from __future__ import annotations

import os
import posixpath
import re

# Schemes of Hadoop, and fsspec's names for them.
_SCHEMES = {"s3a": "s3", "s3n": "s3"}
# Also without a host, as Hadoop and Databricks write it: hdfs:/x, dbfs:/x.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_url(path: str) -> bool:
    """Return whether a path is a URL: as a local path, ``hdfs:/x`` would be a file in a folder ``hdfs:``."""
    return _URL.match(path) is not None


def local_path(path: str) -> str:
    """Return a path that is none of another file system; raise ValueError for a URL."""
    if is_url(path):
        raise ValueError("expected a local path, not a URL of another file system")
    return path


def fsspec_url(path: str) -> str:
    """Return a path as fsspec knows it: a URL, or an absolute local path.

    ``s3a:`` and ``s3n:`` become ``s3:``. ``hdfs:/x`` becomes ``hdfs:///x``. ``dbfs:/x`` becomes ``/dbfs/x``
    if Databricks has mounted it there.
    """
    scheme, colon, rest = path.partition(":")
    if scheme == "dbfs" and colon and os.path.isdir("/dbfs"):
        return posixpath.join("/dbfs", rest.lstrip("/"))
    if scheme in ("file", "local") and colon:  # Hadoop writes file:/x
        return os.path.abspath("/" + rest.lstrip("/"))
    if is_url(path) and not rest.startswith("//"):
        rest = f"//{rest}"
    elif "://" not in path and "::" not in path:
        return os.path.abspath(os.path.expanduser(path))
    return f"{_SCHEMES.get(scheme, scheme)}:{rest.rstrip('/') or '///'}"
