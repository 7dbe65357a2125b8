"""``python -m pyhvd simulate``: its flags and their errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

import msgspec

from pyhvd.common.command_line import CommandParser, show_progress
from pyhvd.common.units import parse_rate, parse_size, parse_span
from pyhvd.config import Config
from pyhvd.errors import ConfigError
from pyhvd.observe.trace.files import TraceError
from pyhvd.observe.trace.loading import load
from pyhvd.simulation import HostLost, Machine, Network
from pyhvd.simulation.command.cases import LARGE, Answer, Case, FlagError, ask
from pyhvd.simulation.command.gradients import (
    Gradients,
    RecordingError,
    from_recording,
    from_sizes,
    parse_sizes,
)
from pyhvd.simulation.command.plot import NEEDED, can_draw, draw
from pyhvd.simulation.command.screen import as_dict, show, title
from pyhvd.simulation.models import MODELS

_EXAMPLES = f"""\
models: {", ".join(MODELS)}

examples:
  python -m pyhvd simulate --hosts 128 --link 25gbit --latency 20us --tensors resnet50 --compute 80ms
  python -m pyhvd simulate --hosts 16 --timeline traces/ --plot scaling.png    the gradients of a recorded job
  python -m pyhvd simulate --hosts 64 --tensors 1000x1KiB --compute 10ms --lose 3@1s:silent --elastic

PYHVD_ variables count as in a job: PYHVD_FUSION_THRESHOLD, PYHVD_CYCLE_TIME, PYHVD_CHUNK_SIZE,
PYHVD_STAGING_SIZE and PYHVD_CACHE_CAPACITY.
"""
_PARTS = 8
_STEPS, _STEPS_IF_LARGE = 4, 2
"""Steps by default."""

T = TypeVar("T")


def main(argv: list[str], cpu: float | None = None) -> int:
    """Simulate a cluster; return the exit code. With `cpu` the text is always the same: see ``simulate``."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        case, gradients = _read(given, cpu)
        try:
            answer = ask(
                case,
                gradients,
                None if given.timeline else given.parts,
                by_hosts=given.plot is not None,
                faults=tuple(given.lose),
                elastic=given.elastic,
                progress=lambda done, total: show_progress(f"simulating: {done} of {total} done"),
            )
        finally:
            show_progress("")
    except (TraceError, RecordingError) as exc:
        parser.error(f"argument --timeline: {exc}")
    except (FlagError, ConfigError) as exc:
        parser.error(str(exc))
    except BrokenProcessPool:
        print(
            f"{parser.prog}: a process that ran a simulation was killed, perhaps as memory ran out: simulate"
            " fewer ranks, or fewer gradients",
            file=sys.stderr,
        )
        return 1
    if given.plot is not None:
        hosts = f"1 to {case.hosts:,} hosts" if case.hosts > 1 else ""
        draw(given.plot, title(case, gradients, hosts), answer.by_hosts)
    _print(given, case, gradients, answer)
    return 0


def _read(given: argparse.Namespace, cpu: float | None) -> tuple[Case, Gradients]:
    """Return the cluster, and what a step submits."""
    ranks = given.hosts * given.local_ranks
    for rank, _ in given.straggler:
        if rank >= ranks:
            raise FlagError(f"argument --straggler: there is no rank {rank}: expected 0 to {ranks - 1}")
    for fault in given.lose:
        if fault.host >= given.hosts:
            raise FlagError(
                f"argument --lose: there is no host {fault.host}: expected 0 to {given.hosts - 1}"
            )
    if len({fault.host for fault in given.lose}) == given.hosts:
        raise FlagError("argument --lose: all hosts would be lost: expected 1 or more that are left")
    if given.elastic and not given.lose:
        raise FlagError("argument --elastic: has an effect only with --lose: expected both")
    if given.plot is not None and not can_draw():
        raise FlagError(f"argument --plot: {NEEDED}")
    gradients = _gradients(given)
    config, _ = Config.from_env(**given.fusion_threshold)
    case = Case(
        hosts=given.hosts,
        local_ranks=given.local_ranks,
        parts=tuple(gradients.in_parts(given.parts)),
        steps=given.steps or (_STEPS if ranks <= LARGE else _STEPS_IF_LARGE),
        network=Network(latency=given.latency, rate=given.link, jitter=given.jitter),
        machine=Machine(cores=given.cores),
        config=config,
        late=dict(given.straggler),
        seed=given.seed,
        cpu=cpu,
    )
    return case, gradients


def _gradients(given: argparse.Namespace) -> Gradients:
    if given.timeline is None:
        if given.compute is None:
            raise FlagError(
                "argument --compute: is missing: expected with --tensors how long a step computes"
            )
        gradients = from_sizes(given.tensors[0], given.tensors[1], given.compute)
    else:
        gradients, notes = from_recording(given.timeline, load([given.timeline]))
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        if given.compute is not None:
            gradients = gradients.scaled(given.compute)
    return gradients.halved() if given.half else gradients


def _print(given: argparse.Namespace, case: Case, gradients: Gradients, answer: Answer) -> None:
    if given.json:
        print(msgspec.json.format(msgspec.json.encode(as_dict(case, gradients, answer))).decode())
        return
    show(case, gradients, answer)
    if given.plot is not None:
        print(f"\n{given.plot}: the same for {', '.join(f'{job.hosts:,}' for job in answer.by_hosts)} hosts")


# -- flags ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    what = "Simulate training on a cluster: where the time of a step goes, and what would help."
    parser = CommandParser(prog="python -m pyhvd simulate", description=what, examples=_EXAMPLES)
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_program(parser.add_argument_group("the program"))
    faults = parser.add_argument_group("what goes wrong")
    faults.add_argument(
        "--straggler", type=_with(_straggler), action="append", default=[], metavar="RANK:TIME",
        help="this rank computes longer in each step, as 5:10ms; may be repeated",
    )  # fmt: skip
    faults.add_argument(
        "--lose", type=_with(_loss), action="append", default=[], metavar="HOST@TIME[:silent]",
        help="simulate the job once more, and lose a host at this time: its connections close, or with silent"
        " it says nothing more; may be repeated",
    )  # fmt: skip
    faults.add_argument("--elastic", action="store_true", help="the job goes on without the lost hosts")
    output = parser.add_argument_group("output")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw 1, 2, 4 ... hosts as a PNG")
    output.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")
    output.add_argument("--seed", type=_with(_whole(0)), default=0, metavar="N", help="of the jitter (0)")
    return parser


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--hosts", type=_with(_whole(1)), required=True, metavar="N", help="hosts")
    group.add_argument(
        "--local-ranks", type=_with(_whole(1)), default=8, metavar="N", help="ranks of each host (8)"
    )
    group.add_argument(
        "--link", type=_with(parse_rate), default=Network.rate, metavar="RATE",
        help="what a host sends, and receives: 25gbit, 12.5GB/s (25gbit)",
    )  # fmt: skip
    group.add_argument(
        "--latency", type=_with(parse_span), default=Network.latency, metavar="TIME",
        help="until a message from another host arrives: 20us, 0.1ms (20us)",
    )  # fmt: skip
    group.add_argument(
        "--jitter", type=_with(parse_span), default=0.0, metavar="TIME",
        help="by which a message may be later, at most (0us)",
    )  # fmt: skip
    group.add_argument(
        "--cores", type=_with(_whole(1)), default=Machine.cores, metavar="N",
        help=f"cores of each host ({Machine.cores})",
    )  # fmt: skip


def _add_program(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--tensors", type=_with(lambda text: (text, parse_sizes(text))), metavar="SIZES",
        help="gradients of float32: a model's, NxSIZE as 1000x1KiB, or sizes with commas",
    )  # fmt: skip
    source.add_argument(
        "--timeline", metavar="PATH",
        help="gradients, their order and the computing time of a recorded timeline: a file or a directory",
    )  # fmt: skip
    group.add_argument(
        "--compute",
        type=_with(parse_span),
        metavar="TIME",
        help="how long a rank computes in a step: 80ms; with --timeline in place of the recorded time",
    )
    group.add_argument("--half", action="store_true", help="half the bytes: float16 in place of float32")
    group.add_argument(
        "--parts", type=_with(_whole(1)), default=_PARTS, metavar="N",
        help=f"how often in a step gradients are submitted, at most; 1: after all computing ({_PARTS})",
    )  # fmt: skip
    group.add_argument(
        "--steps", type=_with(_whole(2)), metavar="N",
        help=f"steps that are simulated ({_STEPS}; with more than {LARGE:,} ranks {_STEPS_IF_LARGE})",
    )  # fmt: skip
    group.add_argument(
        "--fusion-threshold", type=_with(_threshold), default={}, metavar="SIZE",
        help="most bytes that are fused; as PYHVD_FUSION_THRESHOLD",
    )  # fmt: skip


def _with(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a type for argparse whose errors are those of `parse`."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None

    return convert


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r}: expected a whole number, at least {least}")
        return int(text)

    return parse


def _threshold(text: str) -> dict[str, int]:
    return {"fusion_threshold": parse_size(text)}


def _straggler(text: str) -> tuple[int, float]:
    rank, colon, late = text.partition(":")
    if not (colon and rank.isdecimal()):
        raise ValueError(f"{text!r}: expected RANK:TIME, as 5:10ms")
    return int(rank), parse_span(late)


def _loss(text: str) -> HostLost:
    host, sign, rest = text.partition("@")
    at, colon, how = rest.partition(":")
    if not (sign and host.isdecimal()) or (colon and how != "silent"):
        raise ValueError(f"{text!r}: expected HOST@TIME or HOST@TIME:silent, as 3@1s")
    return HostLost(int(host), parse_span(at), silent=bool(colon))
