"""Test the GPU code with the real compiler and the real CuPy, without a GPU (``make test-gpu-build``)."""

from __future__ import annotations

import ast
import ctypes
import importlib
import importlib.util
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyhvd.backends.gpu import nccl_bindings
from pyhvd.devices.packing import KERNEL_TYPES
from tests.devices.kernels_on_cpu import SOURCE

PACKAGE = Path(nccl_bindings.__file__).resolve().parents[2]


def missing(module: str) -> bool:
    """Return whether a module of a wheel is missing."""
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


needs_nvrtc = pytest.mark.skipif(
    missing("nvidia.cuda_nvrtc"), reason="nvidia-cuda-nvrtc-cu12 is not installed: run make test-gpu-build"
)
needs_cupy = pytest.mark.skipif(missing("cupy"), reason="no cupy-cuda12x: make test-gpu-build")


# -- the kernels, by NVRTC -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    wheel = importlib.import_module("nvidia.cuda_nvrtc")
    (library,) = Path(wheel.__path__[0]).glob("lib/libnvrtc.so.*")
    return ctypes.CDLL(str(library))


def compile_with(nvrtc: ctypes.CDLL, name: str, architecture: int) -> tuple[int, str]:
    """Compile by NVRTC; return its status and its messages, with the warnings."""
    # CuPy adds -ftz=true itself.
    texts = ["--std=c++14", "-ftz=true", f"--gpu-architecture=sm_{architecture}", f"-DPYHVD_TYPE={name}"]
    options = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"pack_kernels.cu", 0, None, None)
    status = nvrtc.nvrtcCompileProgram(program, len(texts), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    # This warning concerns the end of NVRTC's support of sm_70, not the code.
    return status, re.sub(
        r"nvrtc: warning: Architectures prior to .* are deprecated.*\n", "", log.value.decode()
    )


@needs_nvrtc
@pytest.mark.parametrize("architecture", [70, 80, 90])
@pytest.mark.parametrize("name", KERNEL_TYPES)
def test_kernels_compile_without_a_warning(nvrtc: ctypes.CDLL, name: str, architecture: int) -> None:
    assert compile_with(nvrtc, name, architecture) == (0, "")


# -- names of CuPy and of its nccl module ----------------------------------------------------------------


def names_used() -> Iterator[str]:
    """Yield every dotted name of CuPy in the package's code."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {"cupy": "cupy"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cupy":
                imported = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                modules |= imported
                yield from imported.values()
        for node in ast.walk(tree):
            rest: list[str] = []
            inner: Any = node
            while isinstance(inner, ast.Attribute):
                rest.insert(0, inner.attr)
                inner = inner.value
            if rest and isinstance(inner, ast.Name) and inner.id in modules:
                yield ".".join([modules[inner.id], *rest])


def nccl_names() -> dict[str, set[str]]:
    """Return the names that pyhvd uses of the nccl module and of its communicators."""
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("nccl*.py")]
    constants = {name for text in sources for name in re.findall(r"NCCL_[A-Z]+\d*\b", text)}
    constants |= {f"NCCL_{code.name}" for code in nccl_bindings._NUMBERS}
    calls = {name for text in sources for name in re.findall(r"library\.(\w+)\(", text)}
    asked = {
        name for text in sources for name in re.findall(r"\bcomm\.(\w+)\b", text.replace("_comm", "comm"))
    }
    return {"": constants | calls, "NcclCommunicator": asked}


@pytest.fixture(scope="module")
def _cupy(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make CuPy's nccl module load a library of empty functions, since NCCL's wheel has 350 MB."""
    spec = importlib.util.find_spec("cupy_backends.cuda.libs.nccl")
    compiler, reader = shutil.which("gcc"), shutil.which("nm")
    if spec is None or spec.origin is None or not (compiler and reader):
        pytest.skip("no nccl module in this CuPy, or no gcc and nm to build its library")
    listed = subprocess.run(
        [reader, "-D", "--undefined-only", spec.origin], capture_output=True, text=True, check=True
    )
    functions = re.findall(r"\bU (nccl\w+)", listed.stdout)
    assert functions
    folder = tmp_path_factory.mktemp("nccl")
    kinds = {name: "const char *" if name == "ncclGetErrorString" else "int" for name in functions}
    values = {"int": "0", "const char *": '"a text"'}
    code = [f"{kind} {name}(void) {{ return {values[kind]}; }}" for name, kind in kinds.items()]
    (folder / "nccl.c").write_text("\n".join(code))
    library = folder / "libnccl.so.2"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "nccl.c", "-o", str(library)]
    subprocess.run(command, cwd=folder, check=True)
    ctypes.CDLL(str(library))  # CuPy's module finds the library by its name


@needs_cupy
@pytest.mark.usefixtures("_cupy")
def test_cupy_has_every_name_that_is_used() -> None:
    names = set(names_used())
    assert {"cupy.RawModule", "cupy.cuda.runtime.streamWaitEvent"} <= names
    unknown = []
    for name in sorted(names):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            unknown.append(name)
    assert not unknown


@needs_cupy
@pytest.mark.usefixtures("_cupy")
def test_its_nccl_module_has_every_name_that_is_used() -> None:
    asked = nccl_names()
    assert {"NCCL_FLOAT32", "NCCL_SUM", "NcclCommunicator", "groupStart"} <= asked[""]
    assert {"allReduce", "abort", "send", "check_async_error"} <= asked["NcclCommunicator"]
    nccl = importlib.import_module("cupy.cuda.nccl")
    assert {name for name in asked[""] if not hasattr(nccl, name)} == set()
    assert {name for name in asked["NcclCommunicator"] if not hasattr(nccl.NcclCommunicator, name)} == set()


@needs_cupy
def test_cupy_takes_pyhvds_streams_without_a_warning() -> None:
    cupy_device = importlib.import_module("pyhvd.devices.cupy_device")
    assert cupy_device.cupy_stream(0x100).ptr == 0x100
    assert cupy_device.cupy_stream(0).ptr == 0


@needs_cupy
@pytest.mark.usefixtures("_cupy")
def test_no_name_that_is_used_is_deprecated() -> None:
    documented = {name: getattr(pkgutil.resolve_name(name), "__doc__", None) for name in names_used()}
    assert [name for name, text in documented.items() if ".. deprecated::" in (text or "")] == []


@needs_cupy
@pytest.mark.usefixtures("_cupy")
@pytest.mark.parametrize(("code", "text"), [(6, "NCCL_ERROR_REMOTE_ERROR"), (7, "code 7"), (8, "code 8")])
def test_each_of_nccls_codes_is_described(code: int, text: str) -> None:
    nccl = importlib.import_module("cupy.cuda.nccl")
    try:
        failure: Exception = nccl.NcclError(code)
    except Exception as exc:
        failure = exc
    assert text in nccl_bindings.describe_failure(failure)
