"""Builds the extensions; everything else about the package is in pyproject.toml.

The extensions never link MPI: they see plain addresses, so one wheel serves every MPI.
"""

import glob

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

WINDOW = ["pyhvd/_window.c", "pyhvd/_moving.c"]
KERNELS = ["pyhvd/_kernels.c", "pyhvd/_convert.c"]


def extension(name, *sources, headers=()):
    return Extension(
        f"pyhvd.{name}",
        sources=[f"pyhvd/{name}.pyx", *sources, *KERNELS],
        depends=sorted(glob.glob("pyhvd/*.h") + glob.glob("pyhvd/*.px[di]")),
        include_dirs=list(headers),
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_22_API_VERSION")] if headers else [],
        # -fno-math-errno and friends change no result; -ffast-math would, and so would fused
        # multiply-adds: with them the bits would depend on the machine.
        extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
    )


setup(
    ext_modules=cythonize(
        [
            extension("_fusion", "pyhvd/_adasum.c"),
            extension("_engine", *WINDOW),
            extension(
                "_lane",
                "pyhvd/_driver.c",
                "pyhvd/_units.c",
                "pyhvd/_board.c",
                *WINDOW,
                headers=[numpy.get_include()],
            ),
        ],
        # Generated C fits the numpy that it was generated with, and another environment may have another one.
        force=True,
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
