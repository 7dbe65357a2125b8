"""The pieces in which a rank's output goes to mpiexec."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from pyhvd.job.process.output import whole_lines

_LINES = st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b" ")), max_size=30)


@given(_LINES, st.booleans(), st.integers(1, 50))
def test_pieces_have_whole_lines(lines: list[bytes], ends: bool, most: int) -> None:
    text = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    pieces = [bytes(piece) for piece in whole_lines(text, most)]
    assert b"".join(pieces) == text
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert all(len(piece) <= most or piece.count(b"\n") <= 1 for piece in pieces)
    for one, other in itertools.pairwise(pieces):  # no piece could take the next one's first line
        assert b"\n" not in other or len(one) + other.index(b"\n") + 1 > most
