"""Builds the extensions; everything else about the package is in pyproject.toml.

The extensions never link MPI: they see plain addresses, so one wheel serves every MPI.
"""

import glob
import os
from concurrent.futures import ThreadPoolExecutor

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SRC = "pyhvd/native/src"
# -fno-math-errno and friends change no result; -ffast-math would, and so would fused multiply-adds: with them
# the bits would depend on the machine.
# Hidden symbols keep the two extensions, which both contain the kernels, apart.
FLAGS = [
    "-D_GNU_SOURCE",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
SOURCES = sorted(glob.glob(f"{SRC}/*/*.c"))
NUMPY_MACROS = ("NPY_NO_DEPRECATED_API", "NPY_TARGET_VERSION")
# The doors through which collectives enter graphs of frameworks, by module. Without a C++ compiler these
# extensions are left out, and pyhvd goes through the frameworks' callbacks.
GRAPH_OPS = {"pyhvd.native._jax_ops": "jax", "pyhvd.native._tensorflow_ops": "tensorflow"}
HEADERS = sorted(glob.glob(f"{SRC}/*/*.h") + glob.glob("pyhvd/native/include/*.h"))


class BuildExt(build_ext):
    """Compile the C sources once, into a static library that both extensions link; on all cores."""

    def build_extensions(self):
        self.parallel = os.cpu_count()
        with ThreadPoolExecutor(self.parallel) as pool:
            objects = [each for made in pool.map(self._compile, SOURCES) for each in made]
        self.compiler.create_static_lib(objects, "pyhvd_native", self.build_temp)
        library = os.path.join(self.build_temp, self.compiler.library_filename("pyhvd_native"))
        for extension in self.extensions:
            if extension.name not in GRAPH_OPS:
                extension.extra_objects.append(library)
        super().build_extensions()

    def _compile(self, source):
        return self.compiler.compile(
            [source], self.build_temp, include_dirs=[SRC], extra_postargs=FLAGS, depends=HEADERS
        )


def extension(name, headers=()):
    return Extension(
        f"pyhvd.{name}",
        sources=[f"pyhvd/{name.replace('.', '/')}.pyx"],
        depends=[*HEADERS, *SOURCES, *sorted(glob.glob("pyhvd/native/*.px[di]"))],
        include_dirs=[SRC, *headers],
        define_macros=[(name, "NPY_1_22_API_VERSION") for name in NUMPY_MACROS] if headers else [],
        extra_compile_args=FLAGS,
    )


def graph_ops(name, source):
    folder = "pyhvd/native/graph_ops"
    return Extension(
        name,
        sources=[f"{folder}/{source}.cpp"],
        depends=[*HEADERS, *sorted(glob.glob(f"{folder}/*.hpp") + glob.glob(f"{folder}/*/*.h"))],
        include_dirs=["pyhvd/native/include"],
        extra_compile_args=["-std=c++17", "-D_GNU_SOURCE", "-O2", "-fvisibility=hidden"],
        language="c++",
        optional=True,
    )


setup(
    cmdclass={"build_ext": BuildExt},
    ext_modules=cythonize(
        [
            extension("_fusion"),
            extension("native.shared_memory", headers=[numpy.get_include()]),
            *(graph_ops(name, source) for name, source in GRAPH_OPS.items()),
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
    ),
)
