"""oversubscribed: resnet with more ranks than cores."""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks import peers
from benchmarks.question import main
from benchmarks.questions import resnet
from benchmarks.report import Target

QUESTION = replace(
    resnet.QUESTION,
    name="oversubscribed",
    title="oversubscribed: the gradients of ResNet-50 (102 MB) on more ranks than cores",
    ranks=(4, 8),
    repeats=20,
    seconds=40,  # MPI takes half a second per repetition, and at most a quarter of the seconds
    targets=(
        Target(
            "over pack + Allreduce + unpack",
            resnet.label(161),
            peers.SINGLY,
            (peers.PACKED,),
            3.0,
            4.5,
            ranks=(4, 8),
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
