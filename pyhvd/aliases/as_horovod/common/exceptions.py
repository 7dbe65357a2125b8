"""``horovod.common.exceptions``."""

from pyhvd.errors import (
    HorovodInternalError as HorovodInternalError,
    HorovodVersionMismatchError as HorovodVersionMismatchError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
)
