"""Count the lines of product code: pyhvd/ without blank lines and comments, with and without docstrings.

Files that git tracks count: Python, Cython, C and CUDA. A docstring is a string in triple quotes that begins
a line. Packages are the folders of pyhvd/; "." is its root.

  python scripts/count_lines.py                # the working tree
  python scripts/count_lines.py --rev HEAD~10  # a revision
  python scripts/count_lines.py --from HEAD~10 # the working tree against a revision: totals alone
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
C_FAMILY = (".c", ".h", ".cu")
PYTHON_FAMILY = (".py", ".pyi", ".pyx", ".pxi", ".pxd")
QUOTES = re.compile(r"""\s*[rRuUbB]*("{3}|'{3})""")
C_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*', re.S)


def git(*arguments: str) -> str:
    """Return the output of a git command in this repository."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout


def read_files(revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield path and text of each product file of a revision, or of the working tree."""
    if revision is None:
        paths = git("ls-files", "pyhvd").splitlines()
    else:
        paths = git("ls-tree", "-r", "--name-only", revision, "pyhvd/").splitlines()
    for path in paths:
        if not path.endswith(C_FAMILY + PYTHON_FAMILY):
            continue
        if revision is not None:
            yield path, git("show", f"{revision}:{path}")
        elif (ROOT / path).exists():
            yield path, (ROOT / path).read_text()


def count_c(text: str) -> tuple[int, int]:
    """Return the lines of C code, and 0 for docstrings."""
    code = C_COMMENT.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    return sum(bool(line.strip()) for line in code.splitlines()), 0


def count_python(text: str) -> tuple[int, int]:
    """Return the lines of Python or Cython code, and those of docstrings; neither has blank lines."""
    code = docstrings = 0
    closing = ""
    for line in text.splitlines():
        if not line.strip():
            continue
        if closing:
            docstrings += 1
            closing = "" if closing in line else closing
        elif match := QUOTES.match(line):
            docstrings += 1
            closing = "" if match[1] in line[match.end() :] else match[1]
        elif not line.lstrip().startswith("#"):
            code += 1
    return code, docstrings


def count(revision: str | None) -> dict[str, Counter[str]]:
    """Return, by package, the lines of code and of docstrings, and the number of files."""
    packages: dict[str, Counter[str]] = {}
    for path, text in read_files(revision):
        parts = Path(path).parts
        package = parts[1] if len(parts) > 2 else "."
        code, docstrings = (count_c if path.endswith(C_FAMILY) else count_python)(text)
        packages.setdefault(package, Counter()).update(code=code, docstrings=docstrings, files=1)
    return packages


def total(packages: dict[str, Counter[str]]) -> Counter[str]:
    """Return the sum over the packages."""
    return sum(packages.values(), Counter())


def row(name: str, counts: Counter[str]) -> str:
    """Return one line of the table."""
    both = counts["code"] + counts["docstrings"]
    return f"{name:<14}{counts['files']:>6,}{counts['code']:>9,}{counts['docstrings']:>12,}{both:>9,}"


def main() -> None:
    """Print the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rev", help="a git revision instead of the working tree")
    parser.add_argument("--from", dest="before", help="a git revision to compare with")
    options = parser.parse_args()
    packages = count(options.rev)
    print(f"{'package':<14}{'files':>6}{'code':>9}{'docstrings':>12}{'both':>9}")
    for name in sorted(packages):
        print(row(name, packages[name]))
    after = total(packages)
    print(row("total", after))
    if options.before:
        before = total(count(options.before))
        print(row(f"{options.before[:12]}", before))
        for kinds, name in ((("code",), "code"), (("code", "docstrings"), "code and docstrings")):
            old, new = (sum(counts[kind] for kind in kinds) for counts in (before, after))
            print(f"{name}: {old:,} -> {new:,} ({100 * (new - old) / old:+.1f} %)")


if __name__ == "__main__":
    main()
