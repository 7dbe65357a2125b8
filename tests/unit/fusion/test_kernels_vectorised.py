"""The compiled kernels use the vector instructions that they were written for.

If a compiler fails to vectorise a loop, it prints nothing and all results stay correct, so these tests
read the machine code.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from pyhvd import _fusion


@pytest.fixture(scope="module")
def functions() -> dict[str, str]:
    """Return the disassembly of each function."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"the instructions looked for are x86-64's, and this is {platform.machine()}")
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump (binutils) is not installed")
    text = subprocess.run(
        [objdump, "--disassemble", "--no-show-raw-insn", str(_fusion.__file__)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = {}
    for block in text.split("\n\n"):
        title = re.match(r"\s*[0-9a-f]+ <([^>]+)>:\n", block)
        if title:
            found[title[1]] = block
    if not any("sum_f32" in name for name in found):
        pytest.skip("the extension has been stripped of its symbols")
    return found


def avx2_clone(functions: dict[str, str], kernel: str) -> str:
    """Return a kernel's AVX2 code, under any of the names that compilers give to it."""
    clone = re.compile(rf"{kernel}\.(?:arch_x86_64_v3|avx2)(?:\.\d+)?")
    for name, text in functions.items():
        if clone.fullmatch(name):
            return text
    pytest.skip("the compiler made no clones (no glibc, or no target_clones)")


@pytest.mark.parametrize(
    ("kernel", "instruction"),
    [
        ("sum_f32", r"vaddps .*%ymm"),
        ("sum_scaled_f32", r"vmulps .*%ymm"),
        ("sum_f64", r"vaddpd .*%ymm"),
        ("sum_32", r"vpaddd .*%ymm"),
        ("min_f32", r"vcmp\w*ps .*%ymm"),
        ("max_f64", r"vcmp\w*pd .*%ymm"),
        ("widen_bf16", r"vpmovzxwd .*%ymm"),
        ("narrow_bf16", r"vpackusdw .*%ymm"),
        ("widen_portable", r"vcvtdq2ps .*%ymm"),
        ("narrow_portable", r"vaddps .*%ymm"),
        ("narrow_f64_to_odd", r"vcvtpd2ps .*%ymm"),
    ],
)
def test_avx2(functions: dict[str, str], kernel: str, instruction: str) -> None:
    assert re.search(instruction, avx2_clone(functions, kernel))


def test_no_fused_multiply_add(functions: dict[str, str]) -> None:
    # A fused operation rounds once, not twice. gcc 12 made some in spite of -ffp-contract=off.
    fused = re.compile(r"\bvfn?m(?:add|sub)")
    assert [name for name, text in functions.items() if fused.search(text)] == []


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("widen_f16c", r"vcvtph2ps .*%ymm"),
        ("narrow_f16c", r"vcvtps2ph .*%ymm"),
        ("widen_avx512", r"vcvtph2ps .*%zmm"),
        ("narrow_avx512", r"vcvtps2ph .*%zmm"),
    ],
)
def test_float16(functions: dict[str, str], name: str, instruction: str) -> None:
    text = next(text for title, text in functions.items() if title.split(".")[0] == name)
    assert re.search(instruction, text)
