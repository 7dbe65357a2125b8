"""Builds the extension; everything else about the package is in pyproject.toml.

The extension never links MPI: it sees plain addresses, so one wheel serves every MPI.
"""

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    ext_modules=cythonize(
        [
            Extension(
                "pyhvd._fusion",
                sources=["pyhvd/_fusion.pyx", "pyhvd/_kernels.c", "pyhvd/_convert.c"],
                depends=["pyhvd/_kernels.h", "pyhvd/_loops.h"],
                # -fno-math-errno and friends change no result; -ffast-math would, and so would fused
                # multiply-adds: with them the bits would depend on the machine.
                extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            )
        ],
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "embedsignature": True,
            "freethreading_compatible": True,
        },
    )
)
