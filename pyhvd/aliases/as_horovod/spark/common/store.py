"""``horovod.spark.common.store``: :class:`pyhvd.spark.Store` under Horovod's names."""

from __future__ import annotations

from typing import Any

from pyhvd.spark import Store as Store

LocalStore = FilesystemStore = DBFSLocalStore = Store


class HDFSStore(Store):
    """A store on HDFS; `driver` and `temp_dir` have no effect."""

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str | None = None,  # noqa: ARG002
        extra_conf: dict[str, str] | None = None,
        temp_dir: str | None = None,  # noqa: ARG002
        **others: Any,
    ) -> None:
        given: dict[str, Any] = {"host": host, "port": port, "user": user, "kerb_ticket": kerb_ticket}
        given["extra_conf"] = extra_conf
        options = dict(others.pop("storage_options", None) or {})
        options |= {name: value for name, value in given.items() if value is not None}
        url = prefix_path if "://" in prefix_path else f"hdfs://{prefix_path}"
        super().__init__(url, storage_options=options, **others)
