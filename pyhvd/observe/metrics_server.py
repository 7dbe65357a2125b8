"""The HTTP server of a rank's metrics, with bounds on the number and the time of connections.

Whoever reaches the port may connect, and each connection takes a thread and a descriptor of the rank. So:

1. At most MOST_CONNECTIONS are open. The oldest is dropped for a new one.
2. A connection ends after CONNECTION_S, at most half a second later.
3. If a connection cannot be accepted for want of descriptors, the oldest is dropped, and the server rests.

Imported only by ranks that serve metrics.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from pyhvd.transport.tcp.connection import NO_DESCRIPTORS

MOST_CONNECTIONS = 32
CONNECTION_S = 5.0
_REST_S = 0.1

_log = logging.getLogger("pyhvd")


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a registry's metrics from construction to :meth:`close`, each request in its own thread.

    Parameters
    ----------
    address : str
        An address or a name of this host.
    port : int
        0 for any free port.
    registry : CollectorRegistry
        The metrics.

    Raises
    ------
    OSError, UnicodeError
        The port is not available, or the address does not belong to this host.
    """

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        # Under the lock: the open connections with the times of their beginning, oldest first. The server's
        # thread adds and drops; the thread of a connection removes its own.
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        super().__init__((str(found[0][4][0]), port), _QuietHandler)
        self.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self.serve_forever, name="pyhvd-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and end all connections; takes up to half a second: the server looks that often."""
        self.shutdown()
        self._drop(most=0)
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; see invariants 1 and 3."""
        try:
            request, address = super().get_request()
        except OSError as exc:
            if exc.errno in NO_DESCRIPTORS:
                self._drop(most=len(self._open) - 1)
                time.sleep(_REST_S)
            raise
        with self._lock:
            self._open[request] = time.monotonic()
        self._drop()
        return request, address

    def service_actions(self) -> None:
        """See invariant 2; called twice a second, or more often."""
        self._drop()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; called by its own thread."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """Log what a connection's end interrupts."""
        _log.debug("a request for metrics failed", exc_info=True)

    def _drop(self, most: int = MOST_CONNECTIONS) -> None:
        """End the connections that are too old, or too many: their threads wake up, and close them."""
        late = time.monotonic() - CONNECTION_S
        with self._lock:
            while self._open:
                oldest, began = next(iter(self._open.items()))
                if began > late and len(self._open) <= most:
                    return
                del self._open[oldest]
                with contextlib.suppress(OSError):  # the peer has gone
                    oldest.shutdown(socket.SHUT_RDWR)
