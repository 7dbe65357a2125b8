"""Tensors in host memory through the public verbs: they come back as tensors, and carry what torch needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pyhvd as hvd
from pyhvd.testing import run_ranks

REDUCED = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
LANES = pytest.mark.parametrize("fast", [True, False], ids=["fast", "by-message"])


def _on(size: int, fast: bool, body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(size, body, *args, timeout=60, knobs={"fast_lane": fast})


def _is_fast(handle: Any) -> bool:
    return type(handle) is hvd.Handle


def _reduce_often(make: Callable[[int], torch.Tensor], fast: bool, in_place: bool = False) -> torch.Tensor:
    """Sum the ranks' tensors several times under one name; check the last call's lane, return its result."""
    verb = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    for _ in range(3):
        given = make(hvd.rank())
        handle = verb(given, name="x", op=hvd.Sum)
        result: torch.Tensor = handle.result()
        assert type(result) is type(given) if in_place else torch.Tensor
        assert (result is given) == in_place
        hvd.barrier()
    assert _is_fast(handle) == fast
    return result


@LANES
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0, 2)], ids=str)
def test_every_dtype_and_shape(fast: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def make(rank: int) -> torch.Tensor:
        return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype) * (rank + 1)

    def body() -> None:
        for in_place in (False, True):
            result = _reduce_often(make, fast, in_place)
            assert result.dtype is dtype
            assert torch.equal(result, make(0) + make(1))

    _on(2, fast, body)


@LANES
def test_a_tensor_that_was_reduced_can_still_be_resized(fast: bool) -> None:
    """FSDP frees the storage of its parameters after it has gathered them, and enlarges it again."""

    def body() -> None:
        tensor = torch.ones(4)
        for _ in range(3):
            hvd.allreduce_(tensor, name="x", op=hvd.Sum)
            hvd.broadcast_(tensor, 0, name="y")
            storage = tensor.untyped_storage()
            storage.resize_(0)
            storage.resize_(16)
            tensor.fill_(1.0)
        tensor.resize_(8)

    _on(2, fast, body)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_dtypes_that_torch_cannot_add(dtype: torch.dtype) -> None:
    def body() -> list[Any]:
        given = torch.tensor([hvd.rank(), 1, 0]).to(dtype)
        results = [hvd.allreduce(given, name="x", op=hvd.Max) for _ in range(3)]
        assert all(each.dtype is dtype for each in results)
        return [each.tolist() for each in results]

    assert _on(2, True, body) == [[[1, 1, 0]] * 3] * 2


@LANES
def test_channels_last_goes_as_it_lies(fast: bool) -> None:
    def make(rank: int) -> torch.Tensor:
        images = torch.arange(120.0).reshape(2, 3, 4, 5) * (rank + 1)
        return images.to(memory_format=torch.channels_last)

    def body() -> None:
        for in_place in (False, True):
            result = _reduce_often(make, fast, in_place)
            assert torch.equal(result, make(0) + make(1))
            assert result.is_contiguous(memory_format=torch.channels_last)
        volume = torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d) * hvd.rank()
        assert torch.equal(hvd.broadcast(volume, 1), torch.ones(2, 3, 4, 5, 6))
        # What goes by rows is row-major.
        assert hvd.allgather(make(0)).shape == (4, 3, 4, 5)

    _on(2, fast, body)


@LANES
def test_another_layout_on_one_rank_is_a_mismatch(fast: bool) -> None:
    def body() -> None:
        images = torch.ones(2, 3, 4, 5)
        for _ in range(3):
            hvd.allreduce(images, name="x")
            hvd.barrier()
        if hvd.rank() == 1:
            images = images.to(memory_format=torch.channels_last)
        with pytest.raises(hvd.MismatchError, match=r"layouts.*rank 0: row-major; rank 1: channels_last"):
            hvd.allreduce(images, name="x")

    _on(2, fast, body)


@LANES
def test_a_numpy_array_does_not_stand_for_channels_last(fast: bool) -> None:
    def body() -> None:
        images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        for _ in range(3):
            hvd.allreduce(images, name="x")
            hvd.barrier()
        with pytest.raises(hvd.MismatchError, match="layouts"):
            hvd.allreduce(images if hvd.rank() else np.ones((2, 3, 4, 5), np.float32), name="x")
        for given in (torch.ones(3), np.ones(3, np.float32)):  # row-major: both kinds may meet
            both = hvd.allreduce(given if hvd.rank() else torch.ones(3), name="y")
            assert type(both) is (type(given) if hvd.rank() else torch.Tensor)

    _on(2, fast, body)


@LANES
def test_gaps_and_repeated_elements(fast: bool) -> None:
    def body() -> None:
        for _ in range(3):
            whole = torch.arange(12.0)
            every_other = whole[::2]
            assert hvd.allreduce_(every_other, name="gaps", op=hvd.Sum) is every_other
            assert whole.tolist() == [n * 2.0 if n % 2 == 0 else n for n in range(12)]
            expanded = torch.ones(1).expand(5)
            assert hvd.allreduce(expanded, name="repeated", op=hvd.Sum).tolist() == [2.0] * 5
            assert hvd.allreduce(torch.ones(3, 4).T, name="turned", op=hvd.Sum).stride() == (1, 4)
        with pytest.raises(ValueError, match="share memory"):
            hvd.allreduce_(expanded)

    _on(2, fast, body)


@LANES
def test_views_that_are_conjugated_or_negated(fast: bool) -> None:
    def body() -> None:
        for _ in range(3):
            given = torch.tensor([1 + 2j, 3 - 1j])
            assert hvd.allreduce(given.conj(), name="conj", op=hvd.Sum).tolist() == [2 - 4j, 6 + 2j]
            single = torch.tensor(1 + 2j)
            assert hvd.allreduce(single.imag, name="one", op=hvd.Sum).item() == 4.0
            assert hvd.allreduce(single.conj().imag, name="one", op=hvd.Sum).item() == -4.0
            column = torch.tensor([1 + 2j])
            assert hvd.allreduce(column.conj().imag, name="column", op=hvd.Sum).item() == -4.0
            conjugated = given.conj()
            hvd.allreduce_(conjugated, name="conj", op=hvd.Sum)
            assert given.tolist() == [2 + 4j, 6 - 2j]

    _on(2, fast, body)


@LANES
def test_leaves_may_be_written_and_what_autograd_recorded_may_not(fast: bool) -> None:
    def body() -> None:
        for _ in range(3):
            weight = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
            assert hvd.broadcast_(weight, 1, name="weight") is weight
            assert weight.tolist() == [1.0] * 3
            assert hvd.allreduce_(weight, name="sum", op=hvd.Sum) is weight
            assert weight.tolist() == [2.0] * 3
            recorded = weight * 2
            with pytest.raises(RuntimeError, match=r"tensor\.detach"):
                hvd.allreduce_(recorded, name="recorded")
            assert not hvd.allreduce(recorded, name="out of place").requires_grad

    _on(2, fast, body)


@LANES
def test_a_backward_pass_that_saved_the_tensor_notices_the_change(fast: bool) -> None:
    def body() -> None:
        for _ in range(3):
            weight = torch.ones(3, requires_grad=True)
            saved = torch.ones(3)
            loss = (weight * saved).sum()
            hvd.allreduce_(saved, name="saved")
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(loss)
            hvd.barrier()

    _on(2, fast, body)


def test_inference_mode() -> None:
    def body() -> None:
        with torch.inference_mode():
            for _ in range(3):
                given = torch.ones(3)
                assert hvd.allreduce_(given, name="x", op=hvd.Sum).tolist() == [2.0] * 3
                assert hvd.allreduce(given, name="y", op=hvd.Sum).tolist() == [4.0] * 3

    _on(2, True, body)


def test_other_verbs_return_tensors() -> None:
    def body() -> None:
        rank = hvd.rank()
        gathered = hvd.allgather(torch.full((rank + 1, 2), rank, dtype=torch.bfloat16))
        assert gathered.dtype is torch.bfloat16
        assert gathered.tolist() == [[0, 0], [1, 1], [1, 1]]
        received, splits = hvd.alltoall(torch.arange(4) + 10 * rank, splits=[1, 3])
        assert received.tolist() == ([0, 10] if rank == 0 else [1, 2, 3, 11, 12, 13])
        assert splits.tolist() == ([1, 1] if rank == 0 else [3, 3])
        part = hvd.reducescatter(torch.arange(3.0), op=hvd.Sum)
        assert part.tolist() == ([0.0, 2.0] if rank == 0 else [4.0])
        mixed = hvd.grouped_allreduce([torch.ones(2), np.ones(2)], op=hvd.Sum)
        assert [type(each) for each in mixed] == [torch.Tensor, np.ndarray]
        empty = hvd.allgather(torch.empty(0, 3))
        assert empty.shape == (0, 3)

    _on(2, True, body)


def test_tensors_in_shared_memory_need_no_copy() -> None:
    def body() -> bool:
        shared = torch.from_numpy(hvd.empty(1 << 18, np.float32))
        for _ in range(3):
            shared.fill_(1.0)
            handle = hvd.allreduce_async_(shared, name="x", op=hvd.Sum)
            handle.wait()
            hvd.barrier()
        assert shared.eq(2.0).all()
        return _is_fast(handle)

    assert _on(2, True, body) == [True, True]


def test_compression() -> None:
    def body() -> None:
        for given in (torch.tensor([1.0, 2.0]), torch.tensor([1.0], dtype=torch.float64), torch.arange(3)):
            result = hvd.allreduce(given, op=hvd.Sum, compression=hvd.Compression.fp16)
            assert result.dtype is given.dtype
            assert torch.equal(result, 2 * given)

    _on(2, True, body)


@pytest.mark.filterwarnings("ignore")  # torch's, of such tensors
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: torch.eye(3).to_sparse(), r"to_dense\(\)"),
        (lambda: torch.eye(3).to_sparse_csr(), r"to_dense\(\)"),
        (lambda: torch.ones(3, device="meta"), "device with memory"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"dequantize\(\)"),
        (lambda: torch.nn.LazyLinear(3).weight, "one batch through the model"),
        (lambda: torch.float32, "expected a tensor"),
    ],
    ids=["sparse", "csr", "meta", "quantized", "lazy", "no-tensor"],
)
def test_what_has_no_plain_memory_is_refused_on_every_rank(make: Callable[[], Any], remedy: str) -> None:
    def body() -> None:
        if hvd.rank() == 0:
            with pytest.raises(TypeError, match=remedy):
                hvd.allreduce(make(), name="x")
        else:
            with pytest.raises(hvd.RankFailedError, match=remedy):
                hvd.allreduce(torch.ones(3), name="x")
        hvd.barrier()

    _on(2, True, body)


def test_a_fake_tensor_and_a_transform_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def body() -> None:
        with FakeTensorMode(), pytest.raises(TypeError, match=r"FakeTensor has no plain memory"):
            hvd.allreduce(torch.ones(3), name="fake")
        with pytest.raises(TypeError, match=r"torch\.func"):
            torch.vmap(lambda each: hvd.allreduce(each, name="vmap"))(torch.ones(2, 3))

    _on(1, True, body)


class Image(torch.Tensor):
    """A class without functions of its own, whose results are of it too."""


class Tagged(torch.Tensor):
    """A class that keeps metadata, as medical images do; results get those of the first argument."""

    affine: str
    functions: int = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Tagged.functions += 1
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Tagged):
            result.affine = args[0].affine
        return result


class Closed(torch.Tensor):
    """A class that refuses all functions of torch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def make_derived(kind: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a derived class, or a parameter of one."""
    if kind == "Parameter":
        return torch.nn.Parameter(values.as_subclass(Image), requires_grad=False)
    if kind == "Buffer":
        return torch.nn.Buffer(values.as_subclass(Image)) if hasattr(torch.nn, "Buffer") else values
    made = torch.Tensor._make_subclass({"Image": Image, "Tagged": Tagged, "Closed": Closed}[kind], values)
    if kind == "Tagged":
        made.__dict__["affine"] = "rows"
    return made


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a derived tensor's plain one, of the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


DERIVED = pytest.mark.parametrize("kind", ["Image", "Tagged", "Closed", "Parameter", "Buffer"])


@DERIVED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
@LANES
def test_tensors_of_derived_classes(fast: bool, dtype: torch.dtype, kind: str) -> None:
    """Results are plain tensors; in place it is the tensor itself, with its class and its metadata."""

    def body() -> None:
        functions = Tagged.functions
        for _ in range(3):
            ones = torch.ones(2, 3).to(dtype)
            given = make_derived(kind, ones.clone())
            results = [
                hvd.allreduce(given, op=hvd.Sum, name="sum"),
                hvd.grouped_allreduce([given, ones], op=hvd.Sum, name="group")[0],
                2 * hvd.broadcast(given, 0, name="broadcast"),
                2 * hvd.allgather(given, name="gather")[:2],
                2 * hvd.alltoall(given, name="cross"),
                hvd.reducescatter(given, op=hvd.Sum, name="scatter").expand(2, 3),
            ]
            for each in results:
                assert type(each) is torch.Tensor
                assert each.dtype is dtype
                assert torch.equal(each, (2 * ones)[: len(each)])
            assert hvd.allreduce_(given, op=hvd.Sum, name="sum") is given
            assert hvd.broadcast_(given, 0, name="in place") is given
            assert hvd.grouped_allreduce_([given], op=hvd.Average, name="group in place")[0] is given
            assert torch.equal(raw(given), 2 * ones)
            slanted = make_derived(kind, torch.ones(4, 4).to(dtype)[::2, 1:])
            hvd.allreduce_(slanted, op=hvd.Sum, name="slanted")
            assert torch.equal(raw(slanted), 2 * ones)
            if kind == "Tagged":
                assert given.affine == "rows"
        assert Tagged.functions == functions, "its class's functions are not called"

    _on(2, fast, body)


@pytest.mark.parametrize(
    "verb", ["allreduce", "grouped", "allgather", "broadcast", "alltoall", "reducescatter"]
)
@pytest.mark.parametrize("kind", ["Image", "Parameter"])
def test_gradients_of_derived_classes(kind: str, verb: str) -> None:
    import pyhvd.torch as torch_hvd

    verbs: dict[str, Callable[[Any], Any]] = {
        "allreduce": lambda x: torch_hvd.allreduce(x, op=hvd.Sum, name="x", compression=hvd.Compression.fp16),
        "grouped": lambda x: torch_hvd.grouped_allreduce([x, torch.ones(1)], op=hvd.Max, name="x")[0],
        "allgather": lambda x: torch_hvd.allgather(x, name="x"),
        "broadcast": lambda x: torch_hvd.broadcast(x, 0, name="x"),
        "alltoall": lambda x: torch_hvd.alltoall(x, name="x"),
        "reducescatter": lambda x: torch_hvd.reducescatter(x, op=hvd.Sum, name="x"),
    }

    def body() -> None:
        def gradient(wrap: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
            leaf = torch.arange(4.0, requires_grad=True)
            if kind == "Parameter":
                leaf = torch.nn.Parameter(wrap(leaf.detach()))
                given = leaf
            else:
                given = wrap(leaf)
            result = verbs[verb](given)
            assert type(result) is torch.Tensor
            torch.autograd.backward((result * torch.arange(1.0, 1.0 + len(result))).sum())
            assert leaf.grad is not None
            values: list[float] = raw(leaf.grad).tolist()
            return values

        assert gradient(lambda x: x.as_subclass(Image)) == gradient(lambda x: x)

    _on(2, True, body)


def test_a_backward_pass_notices_a_change_through_a_derived_class() -> None:
    def body() -> None:
        for _ in range(3):
            leaf = torch.ones(3, requires_grad=True)
            saved = leaf.exp()
            hvd.allreduce_(saved.detach().as_subclass(Image), op=hvd.Sum, name="x")
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(saved.sum())
            recorded = (leaf * 2).as_subclass(Image)
            with pytest.raises(RuntimeError, match=r"tensor\.detach"):
                hvd.allreduce_(recorded, name="recorded")

    _on(2, True, body)


def test_compression_of_derived_classes() -> None:
    import pyhvd.torch as torch_hvd

    def body() -> None:
        for kind in ("Image", "Tagged"):
            for compression in (torch_hvd.Compression.fp16, torch_hvd.Compression.bf16):
                given = make_derived(kind, torch.tensor([1.0, 2.0]))
                result = torch_hvd.allreduce(given, op=hvd.Sum, compression=compression)
                assert (type(result), result.dtype) == (torch.Tensor, torch.float32)
                assert result.tolist() == [2.0, 4.0]

    _on(2, True, body)


class Hollow(torch.Tensor):
    """A tensor without memory, around another one."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def _resized() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


NESTED = [torch.ones(2), torch.ones(3)]


@pytest.mark.filterwarnings("ignore")
@LANES
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in-place"])
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Hollow(torch.ones(3)), "a Hollow has no plain memory: pass a torch.Tensor"),
        (lambda: torch.nested.nested_tensor(NESTED), r"tensor\.unbind\(\) to a grouped operation"),
        (lambda: torch.nested.nested_tensor(NESTED, layout=torch.jagged), r"tensor\.unbind\(\)"),
        (lambda: torch._to_functional_tensor(torch.ones(3)), r"no memory of its own: pass tensor\.clone\(\)"),
        (lambda: torch._efficientzerotensor((3,)), r"no memory of its own: pass tensor\.clone\(\)"),
        (_resized, "no memory of its own"),
    ],
    ids=["wrapper", "nested", "jagged", "functional", "zeros", "freed"],
)
def test_what_has_no_memory_is_refused_with_a_remedy(
    make: Callable[[], Any], remedy: str, in_place: bool, fast: bool
) -> None:
    import pyhvd.torch as torch_hvd

    verb = torch_hvd.allreduce_ if in_place else torch_hvd.allreduce

    def body() -> None:
        for _ in range(3):
            verb(torch.ones(3), name="x")
        if hvd.rank() == 0:
            with pytest.raises(TypeError, match=remedy):
                verb(make(), name="x")
        else:
            with pytest.raises(hvd.RankFailedError, match=remedy):
                verb(torch.ones(3), name="x")
        hvd.barrier()

    _on(2, fast, body)


def _grad(function: Any, given: Any) -> None:
    torch.func.grad(lambda x: function(x).sum())(given)


def _grad_of_another(function: Any, given: Any) -> None:
    other = torch.ones(3, requires_grad=True)
    torch.func.grad(lambda x: (x * function(other)).sum())(given)


def _dual(function: Any, given: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        assert function(given).tolist() == [1.0] * 3, "without a tangent"
        function(torch.autograd.forward_ad.make_dual(given, given))


def _dual_and_recorded(function: Any, given: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        function(torch.autograd.forward_ad.make_dual(given.requires_grad_(), torch.ones(3)))


TRANSFORMS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "grad": (_grad, r"torch\.func.*torch\.autograd\.grad"),
    "grad of another": (_grad_of_another, r"torch\.func.*torch\.autograd\.grad"),
    "vmap": (lambda function, given: torch.vmap(function)(given.expand(2, 3)), r"torch\.func"),
    "jvp": (lambda function, given: torch.func.jvp(function, (given,), (given,)), r"torch\.func"),
    "jacrev": (lambda function, given: torch.func.jacrev(function)(given), r"torch\.func"),
    "jacfwd": (lambda function, given: torch.func.jacfwd(function)(given), r"torch\.func"),
    "dual": (_dual, r"lose its tangent.*unpack_dual"),
    "dual and recorded": (_dual_and_recorded, r"lose its tangent.*unpack_dual"),
    "jacobian": (
        lambda function, given: torch.autograd.functional.jacobian(function, given, vectorize=True),
        "pass vectorize=False",
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch's, at its first jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
@LANES
def test_transforms_are_refused_with_a_remedy(fast: bool, transform: str) -> None:
    """One rank, as torch allows one level of dual tensors in all threads of a process."""
    import pyhvd.torch as torch_hvd

    apply, remedy = TRANSFORMS[transform]

    def body() -> None:
        for _ in range(3):
            torch_hvd.allreduce(torch.ones(3), op=hvd.Sum, name="x")
            torch_hvd.allreduce(torch.ones(3), op=hvd.Sum, name="x.grad")
            torch_hvd.grouped_allreduce([torch.ones(3)], op=hvd.Sum, name="group")
        for verb in (
            lambda x: torch_hvd.allreduce(x, op=hvd.Sum, name="x"),
            lambda x: torch_hvd.grouped_allreduce([x], op=hvd.Sum, name="group")[0],
        ):
            with pytest.raises(TypeError, match=remedy):
                apply(verb, torch.ones(3))

    _on(1, fast, body)


def test_a_jacobian_that_is_not_vectorised() -> None:
    import pyhvd.torch as torch_hvd

    def body() -> None:
        def function(given: Any) -> Any:
            return torch_hvd.allreduce(given, op=hvd.Sum, name="x")

        jacobian: Any = torch.autograd.functional.jacobian(function, torch.ones(3))
        assert torch.equal(jacobian, 2 * torch.eye(3))

    _on(2, True, body)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.complex32], ids=str)
def test_dtypes_that_are_moved_and_not_reduced(dtype: torch.dtype, fast: bool) -> None:
    def body() -> None:
        given = torch.tensor([[1.0], [hvd.rank() + 2.0]]).to(dtype)
        words = given.view(torch.int32 if dtype is torch.complex32 else torch.uint8)
        for _ in range(3):
            gathered = hvd.allgather(given, name="rows")
            assert gathered.dtype is dtype
            assert gathered.to(torch.complex64).tolist() == [[1.0], [2.0], [1.0], [3.0]]
            assert hvd.alltoall(given, name="cross").to(torch.complex64)[1] == 1 + 2 * hvd.rank()
            mine = given.clone()
            assert hvd.broadcast_(mine, 0, name="mine") is mine
            assert mine.to(torch.complex64)[1] == 2.0
            # The name then belongs to a dtype of the same code.
            hvd.allreduce(words, name="x", op=hvd.Sum)
            with pytest.raises(hvd.UnsupportedDtypeError, match=r"not defined for .*it can be moved"):
                hvd.allreduce(given, name="x", op=hvd.Sum)

    _on(2, fast, body)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    def body() -> None:
        with pytest.raises(hvd.UnsupportedDtypeError, match="uint4"):
            hvd.allgather(torch.empty(3, dtype=torch.uint4), name="x")

    _on(1, True, body)


def test_a_tensor_beside_a_joined_rank() -> None:
    def body() -> None:
        if hvd.rank() == 1:
            hvd.join()
        else:
            images = torch.ones(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
            assert torch.equal(hvd.allreduce(images, op=hvd.Sum), images)
            assert hvd.allgather(torch.ones(2, 3)).shape == (2, 3)
            hvd.join()

    _on(2, True, body)


def test_an_allocation_that_fails_is_an_error_on_every_rank() -> None:
    def body() -> None:
        with pytest.raises((MemoryError, hvd.RankFailedError)):
            hvd.allreduce(torch.ones(1).expand(1 << 46), name="x")

    _on(1, True, body)


def test_torch_is_not_imported_by_pyhvd() -> None:
    program = "import sys, pyhvd as hvd; hvd.init(); hvd.allreduce(1.0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
