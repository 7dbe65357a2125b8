"""Draw the packages of pyhvd, layer by layer, into docs/packages.svg.

The layers are those of the import contract in pyproject.toml; the text in a box is the first sentence of the
module's docstring. A test compares the committed picture with this script's output.

  python scripts/draw_packages.py           # write the picture
  python scripts/draw_packages.py --check   # exit with 1 if the committed picture is not up to date
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "packages.svg"

WIDTH = 960
MARGIN = 20
GAP = 10
LINE = 16
CHARACTER = 6.9
"""Estimated width of a character, in pixels."""
LEGEND = "Imports run downwards only. Boxes that touch may also import each other."
STYLE = (
    "rect{fill:#eef3fa;stroke:#4a6a94}text{font:12px sans-serif;fill:#333}"
    ".name{font:bold 14px monospace;fill:#12355b}.legend{font-style:italic}"
)


@dataclass(frozen=True)
class Box:
    """One package or module: its name as in the tree, and what it owns."""

    name: str
    text: str


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring as plain text."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.])\s", paragraph)[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", sentence).replace("`", "").rstrip(".:;")


def box_of(module: str) -> Box:
    """Return the box of a module named in the contract."""
    path = ROOT.joinpath(*module.split("."))
    short = path.name
    if path.is_dir():
        return Box(f"{short}/", first_sentence(docstring_of(path / "__init__.py")))
    if (path.with_suffix(".py")).exists():
        return Box(f"{short}.py", first_sentence(docstring_of(path.with_suffix(".py"))))
    raise SystemExit(f"pyproject.toml: the import contract names {module}, which does not exist")


def docstring_of(path: Path) -> str:
    """Return the docstring of a file, which must have one."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if docstring is None:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    return docstring


def read_layers() -> list[tuple[bool, list[Box]]]:
    """Return the layers from top to bottom: whether the members may import each other, and the members."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["type"] == "layers" and "containers" not in each)
    return [
        (":" in layer, [box_of(module.strip()) for module in re.split("[|:]", layer)])
        for layer in contract["layers"]
    ]


def split_wide(touching: bool, boxes: list[Box]) -> list[tuple[bool, list[Box]]]:
    """Cut a layer of many members into rows of at most four."""
    rows = -(-len(boxes) // 4)
    each = -(-len(boxes) // rows)
    return [(touching, boxes[k : k + each]) for k in range(0, len(boxes), each)]


def draw() -> str:
    """Return the picture as SVG."""
    shapes: list[str] = []
    y = MARGIN
    for touching, members in read_layers():
        rows = split_wide(touching, members)
        for number, (_, boxes) in enumerate(rows):
            gap = 0 if touching else GAP
            width = (WIDTH - 2 * MARGIN - gap * (len(boxes) - 1)) / len(boxes)
            texts = [textwrap.wrap(box.text, int((width - 20) / CHARACTER)) for box in boxes]
            height = 30 + LINE * max(map(len, texts))
            for at, (box, lines) in enumerate(zip(boxes, texts, strict=True)):
                shapes += draw_box(MARGIN + at * (width + gap), y, width, height, box.name, lines)
            last = number == len(rows) - 1
            y += height + (0 if touching and not last else GAP)
    shapes.append(f'<text class="legend" x="{MARGIN}" y="{y + LINE}">{LEGEND}</text>')
    height = y + 2 * LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The packages of pyhvd, layer by layer">'
    )
    background = f'<rect width="{WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", background, *shapes, "</svg>"]) + "\n"


def draw_box(x: float, y: float, width: float, height: float, name: str, lines: list[str]) -> list[str]:
    """Return one box with its name and its text."""
    shapes = [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>',
        f'<text class="name" x="{x + 10:.1f}" y="{y + 19}">{escape(name)}</text>',
    ]
    shapes += [
        f'<text x="{x + 10:.1f}" y="{y + 19 + LINE * (number + 1)}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    return shapes


def main() -> int:
    """Write the picture, or compare it with the committed one."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed picture")
    options = parser.parse_args()
    picture = draw()
    if not options.check:
        PICTURE.write_text(picture)
        return 0
    if PICTURE.exists() and PICTURE.read_text() == picture:
        return 0
    print("docs/packages.svg is out of date: run python scripts/draw_packages.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
