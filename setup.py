"""Builds the extensions; everything else about the package is in pyproject.toml.

The extensions never link MPI: they see plain addresses, so one wheel serves every MPI.
"""

from Cython.Build import cythonize
from setuptools import Extension, setup

KERNELS = ["pyhvd/_kernels.c", "pyhvd/_convert.c"]


def extension(name, *sources):
    return Extension(
        f"pyhvd.{name}",
        sources=[f"pyhvd/{name}.pyx", *sources, *KERNELS],
        depends=["pyhvd/_kernels.h", "pyhvd/_loops.h", "pyhvd/_window.h"],
        # -fno-math-errno and friends change no result; -ffast-math would, and so would fused
        # multiply-adds: with them the bits would depend on the machine.
        extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
    )


setup(
    ext_modules=cythonize(
        [extension("_fusion"), extension("_engine", "pyhvd/_window.c")],
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
