"""``python -m pyhvd top``: a live table of the ranks of a running job.

The command finds ranks by their endpoint files (:mod:`pyhvd.observe.endpoint_files`), or takes ports or
addresses. It reads their metrics endpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from pyhvd.common.command_line import CommandParser
from pyhvd.common.tables import align, rich_table
from pyhvd.observe.endpoint_files import RankFile, read_files
from pyhvd.run.options import positive_float, positive_int
from pyhvd.tools.scraping import HostRow, RateRow, host_rates, rates, scrape

_EXAMPLES = """\
examples:
  pyhvdrun -n 4 --metrics-port 0 train.py    a job to look at
  python -m pyhvd top                        the job on this host, twice a second
  python -m pyhvd top --once                 one table, for a script; --json: one line of JSON
  python -m pyhvd top --port 9400 --ranks 4  ports 9400 to 9403, as --metrics-port 9400 has them
  python -m pyhvd top --url http://node2:9400/metrics --url http://node3:9400/metrics
"""

MOST_PORT = (1 << 16) - 1
# An elastic job without ranks has ended after so long; else its next generation has come up.
_RESTART_S = 10.0

_COLUMNS = ("rank", "tensors/s", "GB/s", "cache hits", "lane", "waits", "awaited", "errors", "stalled")
_KEY = (
    "waits: time that the program waited for results; awaited: time that all others waited for this rank;"
    " stalled: overdue tensors"
)
_HOST_COLUMNS = ("host", "to it MB/s", "from it MB/s", "link waits", "last", "awaited")
_HOST_KEY = (
    "link waits: time that ranks waited until this host's bytes came; last: operations whose last bytes came"
    " from it; awaited: time that a host waited for this one's tensors"
)


class NoJobError(Exception):
    """No job to show; the text names the remedy."""


def main(argv: list[str]) -> int:
    """Show a job until it ends; return 0, or 1 if there is no job."""
    given = _parse(argv)
    try:
        _watch(_find(given), given)
    except (NoJobError, ImportError) as exc:
        print(f"pyhvd top: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _watch(urls: Sequence[str], given: argparse.Namespace) -> None:
    first = scrape(urls)
    before = first.readings
    if not before:
        why = " in time (stopped, or holding the GIL)" if first.silent else ""
        raise NoJobError(f"no rank answers{why} at {', '.join(urls)}")
    job, elastic = before[0].job, before[0].generation is not None
    shown, seen_at = False, time.monotonic()
    with _screen(given) as show:
        while True:
            time.sleep(given.interval)
            after = scrape(_find_again(urls, job, given) if elastic else urls)
            if rows := rates(before, after.readings):
                shown = True
                title = heading(rows, job, after.readings[0].size, len(after.silent))
                show(title, rows, host_rates(before, after.readings))
            if not after.over:
                seen_at = time.monotonic()
            over = not elastic or time.monotonic() > seen_at + _RESTART_S
            if (after.over and over) or (given.once and shown):
                break
            before = after.readings or before
    if after.over and not given.json:
        print(f"job {job} has ended")
    if not shown:
        raise NoJobError(f"job {job} ended before anything could be measured")


# -- which ranks ---------------------------------------------------------------------------------------


def _find(given: argparse.Namespace) -> list[str]:
    """Return the ranks' addresses."""
    if given.url:
        return list(given.url)
    if given.ports:
        return [f"http://{_host(given.address)}:{port}/metrics" for port in given.ports]
    files = read_files()
    # The file of a killed rank may still exist, and its process id may belong to another process.
    seen = scrape([_url(file) for file in files])
    alive = {reading.job for reading in seen.readings}
    alive |= {file.job for file in files if _url(file) in seen.silent}
    if given.job is not None:
        alive = {job for job in alive if given.job in (job, job.rpartition("-")[0])}
    if not alive:
        which = f"no job {given.job!r}" if given.job is not None else "no job"
        raise NoJobError(
            f"{which} of yours that serves metrics runs on this host:"
            " start one with pyhvdrun --metrics-port 0, or with PYHVD_METRICS_PORT=0"
        )
    if len(alive) > 1:
        raise NoJobError(f"several jobs run here; choose one with --job: {', '.join(sorted(alive))}")
    return [_url(file) for file in files if file.job in alive]


def _find_again(urls: Sequence[str], job: str, given: argparse.Namespace) -> Sequence[str]:
    """Return the addresses of an elastic job's ranks, which a new generation may have elsewhere."""
    if given.url or given.ports:
        return urls
    return [_url(file) for file in read_files() if file.job == job] or urls


def _url(file: RankFile) -> str:
    return f"http://{_host(file.address)}:{file.port}/metrics"


def _host(address: str) -> str:
    if address in ("0.0.0.0", "", "::"):  # it listens on all addresses, so on this host too
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


# -- screens -------------------------------------------------------------------------------------------


def cells(row: RateRow) -> tuple[str, ...]:
    """Return the texts of a row."""
    by_share = sorted(row.lanes.items(), key=lambda item: -item[1])
    lane = " ".join(name if share > 99.5 else f"{name} {share:.0f}%" for name, share in by_share)
    return (
        str(row.rank),
        f"{row.tensors_per_second:,.0f}",
        f"{row.bytes_per_second / 1e9:.3f}",
        _percent(row.cache_hit_percent),
        lane or "-",
        _percent(row.wait_percent),
        _percent(row.awaited_percent),
        str(row.errors),
        str(row.stalled) if row.rank == 0 else "-",
    )


def host_cells(row: HostRow) -> tuple[str, ...]:
    """Return the texts of a host's row."""
    return (
        row.host,
        f"{row.sent_per_second / 1e6:,.1f}",
        f"{row.received_per_second / 1e6:,.1f}",
        *map(_percent, (row.wait_percent, row.last_percent, row.awaited_percent)),
    )


def heading(rows: Sequence[RateRow], job: str, size: int, silent: int = 0) -> str:
    """Return the line above the table: number of ranks, silent ranks, and the slowest rank."""
    later = "" if rows[0].generation is None else f" of generation {rows[0].generation}"
    text = f"{job}: {len(rows)} of {size} ranks{later}, over {rows[0].seconds:.2f} s"
    if silent:
        text += f"; {silent} do not answer (stopped, or holding the GIL)"
    known = [(row.awaited_percent, row.rank) for row in rows if row.awaited_percent is not None]
    if known and max(known)[0] >= 1:
        share, rank = max(known)
        text += f"; slowest: rank {rank}, for which the others waited {share:.0f}% of the time"
    return text


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


Show = Callable[[str, Sequence[RateRow], Sequence[HostRow]], None]
"""Shows the rows of one interval under a title: of ranks, and of hosts if there are links."""


def _show_json(title: str, rows: Sequence[RateRow], hosts: Sequence[HostRow]) -> None:
    found = {"job": rows[0].job, "title": title, "ranks": rows, "hosts": hosts}
    print(json.dumps(found, default=dataclasses.asdict), flush=True)


def _show_plain(title: str, rows: Sequence[RateRow], hosts: Sequence[HostRow]) -> None:
    lines = align([_COLUMNS, *map(cells, rows)])
    if hosts:
        lines += ["", *align([_HOST_COLUMNS, *map(host_cells, hosts)], left=1)]
    print(title, *lines, "", sep="\n", flush=True)


@contextlib.contextmanager
def _rich_screen() -> Iterator[Show]:
    """Yield a function that redraws the tables in place."""
    from rich.console import Group
    from rich.live import Live
    from rich.markup import escape

    def show(title: str, rows: Sequence[RateRow], hosts: Sequence[HostRow]) -> None:
        layout = {"caption": _KEY, "title": escape(title), "title_justify": "left"}
        tables = [rich_table(_COLUMNS, map(cells, rows), **layout)]
        if hosts:
            tables.append(rich_table(_HOST_COLUMNS, map(host_cells, hosts), caption=_HOST_KEY))
        live.update(Group(*tables), refresh=True)

    with Live(auto_refresh=False) as live:
        yield show


def _screen(given: argparse.Namespace) -> AbstractContextManager[Show]:
    if given.json:
        return contextlib.nullcontext(_show_json)
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return _rich_screen()
    return contextlib.nullcontext(_show_plain)


# -- flags ---------------------------------------------------------------------------------------------


def _parse(argv: list[str]) -> argparse.Namespace:
    what = f"Show what the ranks of a running job do, until it ends. {_KEY}. Of hosts: {_HOST_KEY}."
    parser = CommandParser(prog="python -m pyhvd top", description=what, examples=_EXAMPLES)
    parser.add_argument("--job", metavar="NAME", help="which job, if several run here")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", type=_address, action="append", help="a rank's endpoint; may be given again")
    where.add_argument("--ports", type=_ports, metavar="P,P,...", help="the ranks' ports")
    where.add_argument("--port", type=_port, metavar="P", help="rank 0's port; the others' follow")
    parser.add_argument(
        "--ranks", type=positive_int, default=1, metavar="N", help="... how many (default: 1)"
    )
    parser.add_argument("--address", default="127.0.0.1", help="of the ports (default: 127.0.0.1)")
    parser.add_argument(
        "--interval", type=_seconds, default=0.5, metavar="S", help="seconds between tables (default: 0.5)"
    )
    parser.add_argument("--once", action="store_true", help="one table, over one interval, then end")
    parser.add_argument("--json", action="store_true", help="a line of JSON instead of each table")
    given = parser.parse_args(argv)
    if given.port is not None:
        given.ports = range(given.port, given.port + given.ranks)
        if (last := given.ports[-1]) > MOST_PORT:
            parser.error(
                f"argument --ranks: the last one's port would be {last}, but a port is at most {MOST_PORT}"
            )
    return given


def _port(text: str) -> int:
    value = positive_int(text)
    if value > MOST_PORT:
        raise argparse.ArgumentTypeError(f"a port is at most {MOST_PORT}, not {value}")
    return value


def _ports(text: str) -> list[int]:
    try:
        return [_port(word) for word in text.split(",")]
    except argparse.ArgumentTypeError as exc:
        raise argparse.ArgumentTypeError(f"expected ports such as 9400,9401, not {text!r}: {exc}") from None


def _address(text: str) -> str:
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port):
            return text
    raise argparse.ArgumentTypeError(f"expected an address such as http://node2:9400/metrics, not {text!r}")


def _seconds(text: str) -> float:
    value = positive_float(text)
    if value < 0.01:
        raise argparse.ArgumentTypeError(f"must be at least 0.01 s, not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
