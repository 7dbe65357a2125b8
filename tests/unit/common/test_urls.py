"""Paths that are URLs."""

from __future__ import annotations

import os

import pytest

from pyhvd.common.urls import fsspec_url, is_url


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("hdfs:/x", "hdfs:///x"),
        ("hdfs://name:8020/x/", "hdfs://name:8020/x"),
        ("s3:/b/x", "s3:///b/x"),
        ("s3a://b/x", "s3://b/x"),
        ("dbfs:/x", "dbfs:///x"),
        ("memory://a", "memory://a"),
        ("file:/x/y", "/x/y"),
        ("file:///x", "/x"),
        ("simplecache::s3://b/x", "simplecache::s3://b/x"),
    ],
)
def test_schemes_go_where_hadoop_sends_them(given: str, url: str) -> None:
    assert fsspec_url(given) == url
    assert is_url(given) == ("::" not in given)


@pytest.mark.parametrize("given", ["a/b", "/a/b", "a:b", "c:d/e", "~/x", "."])
def test_local_paths(given: str) -> None:
    assert fsspec_url(given) == os.path.abspath(os.path.expanduser(given))
    assert not is_url(given)
