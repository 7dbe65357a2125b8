"""The kernels in C: pack, unpack, scale, cast, reduce and fill over plain addresses.

Owns nothing: no memory, no state.

1. Addresses are integers (``array.ctypes.data``) without alignment. During a call, the caller keeps the
   memory alive and free of other writers.
2. Dtypes and ops are the codes of :mod:`pyhvd.dtypes`; sizes count elements.
3. Only calls that touch more than 32 KiB release the GIL. A shorter call ends before another thread could
   use the GIL, and to take it back can cost a switch interval (5 ms).
4. The same input gives the same bits on every machine, as ``kernels.h`` states.
5. The kernels themselves refuse codes that are unknown or do not go together; that is a ValueError. They
   do not look at codes that they do not need, as where there are no elements.
"""

from libc.stdint cimport int64_t, uintptr_t


cdef extern from "kernels/kernels.h" nogil:
    Py_ssize_t pyhvd_itemsize(int dtype)  # 0 for an unknown code
    int pyhvd_reduce(void* dst, const int64_t* srcs, size_t p, size_t count, int dtype, int op, double factor)
    int pyhvd_scale(void* dst, const void* src, size_t count, int dtype, double factor)
    int pyhvd_cast(void* dst, int dst_dtype, const void* src, int src_dtype, size_t count)
    int pyhvd_fill(void* dst, size_t count, int dtype, int op)
    int pyhvd_pack(
        void* dst, const int64_t* ptrs, const int64_t* counts, size_t n, int dtype, int op, double factor
    )
    int pyhvd_unpack(const void* src, const int64_t* ptrs, const int64_t* counts, size_t n, int dtype)
    int pyhvd_adasum_terms(
        double* terms, const void* a, const void* b, const int64_t* counts, size_t n, int dtype
    )
    int pyhvd_adasum_combine(
        void* dst, const void* a, const void* b, const int64_t* counts, const double* factors, size_t n,
        int dtype
    )
    int pyhvd_f16_path()
    bint pyhvd_f16_has(int path)
    void pyhvd_f16_widen(int path, float* dst, const void* src, size_t count)
    void pyhvd_f16_narrow(int path, void* dst, const float* src, size_t count)


cdef extern from "Python.h":
    ctypedef struct PyThreadState
    PyThreadState* PyEval_SaveThread()
    void PyEval_RestoreThread(PyThreadState* state)


cdef tuple _PATHS = ("portable", "f16c", "avx512")

cdef enum:
    KEEP_GIL = 32768  # bytes that a call may touch without releasing the GIL


# ---- Helpers ----

# Between _leave and _enter, a function calls one C kernel and nothing else. That raises no error, so no
# try/finally is needed. "with nogil" cannot be conditional at run time.
cdef inline PyThreadState* _leave(Py_ssize_t touched):
    """Release the GIL if the work is long enough; pass the result to `_enter`."""
    return PyEval_SaveThread() if touched > KEEP_GIL else NULL


cdef inline int _enter(PyThreadState* state, int rc) except -1:
    """Take the GIL back; raise an error if the kernel has refused, and touched no memory."""
    if state != NULL:
        PyEval_RestoreThread(state)
    if rc != 0:
        raise ValueError("no kernel has this combination of dtype, op and factor: kernels.h has them")
    return 0


cdef int _check_count(Py_ssize_t count, uintptr_t first, uintptr_t second) except -1:
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    if count > 0 and (first == 0 or second == 0):
        raise ValueError("the address of a non-empty array is 0")
    return 0


cdef Py_ssize_t _check_pieces(const int64_t[::1] ptrs, const int64_t[::1] counts) except -1:
    """Return the number of elements in all pieces."""
    cdef Py_ssize_t i, total = 0
    if ptrs.shape[0] != counts.shape[0]:
        raise ValueError(f"{ptrs.shape[0]} addresses, but {counts.shape[0]} counts")
    for i in range(counts.shape[0]):
        if counts[i] < 0:
            raise ValueError(f"counts[{i}] must not be negative, got {counts[i]}")
        total += counts[i]
    return total


# ---- The Python face ----

def pack(
    uintptr_t dst,
    const int64_t[::1] ptrs not None,
    const int64_t[::1] counts not None,
    int dtype,
    int op=1,
    double factor=1.0,
):
    """Concatenate arrays into a buffer, multiplying by a factor on the way.

    Parameters
    ----------
    dst : int
        Address of the buffer; it may not overlap the pieces.
    ptrs : int64 array, C-contiguous
        Addresses of the pieces. 0 stands for a rank that has joined: its piece is filled with the
        neutral element of `op`.
    counts : int64 array, C-contiguous
        Elements in each piece.
    dtype, op : int
        Codes of `pyhvd.dtypes`; `op` matters only where an address is 0.
    factor : float
        1.0 copies the bits. Otherwise as in `scale`.

    Raises
    ------
    ValueError
        For unknown codes, lengths that differ, a negative count, a bool with a factor, and a joined
        rank's piece for which `op` has no neutral element.
    """
    cdef Py_ssize_t n = ptrs.shape[0], total = _check_pieces(ptrs, counts)
    cdef Py_ssize_t touched = 2 * total * pyhvd_itemsize(dtype)
    _check_count(total, dst, dst)
    if total > 0:
        state = _leave(touched)
        _enter(state, pyhvd_pack(<void*>dst, &ptrs[0], &counts[0], <size_t>n, dtype, op, factor))


def unpack(uintptr_t src, const int64_t[::1] ptrs not None, const int64_t[::1] counts not None, int dtype):
    """Copy a buffer out into arrays: the reverse of `pack`, without a factor.

    Parameters
    ----------
    src : int
        Address of the buffer.
    ptrs : int64 array, C-contiguous
        Addresses of the pieces; where it is 0, the piece is skipped.
    counts : int64 array, C-contiguous
        Elements in each piece.
    dtype : int
        Code of `pyhvd.dtypes`.

    Raises
    ------
    ValueError
        For an unknown dtype, lengths that differ and a negative count.
    """
    cdef Py_ssize_t total = _check_pieces(ptrs, counts)
    cdef Py_ssize_t touched = 2 * total * pyhvd_itemsize(dtype)
    _check_count(total, src, src)
    if total > 0:
        state = _leave(touched)
        _enter(state, pyhvd_unpack(<void*>src, &ptrs[0], &counts[0], <size_t>ptrs.shape[0], dtype))


def scale(uintptr_t dst, uintptr_t src, Py_ssize_t count, int dtype, double factor):
    """Multiply an array by a factor: ``dst = src * factor``.

    float16, bfloat16, float32 and complex64 use the factor as float32, the others as float64. Integers are
    truncated toward zero and saturate; NaN gives 0. With 1.0 the bits are copied.

    Parameters
    ----------
    dst, src : int
        Addresses; equal, or of arrays that do not overlap.
    count : int
        Elements.
    dtype : int
        Code of `pyhvd.dtypes`.
    factor : float
        The factor.

    Raises
    ------
    ValueError
        For an unknown dtype, a negative count, and bool with a factor other than 1.
    """
    cdef Py_ssize_t touched = 2 * count * pyhvd_itemsize(dtype)
    _check_count(count, dst, src)
    state = _leave(touched)
    _enter(state, pyhvd_scale(<void*>dst, <void*>src, <size_t>count, dtype, factor))


def cast(uintptr_t dst, int dst_dtype, uintptr_t src, int src_dtype, Py_ssize_t count):
    """Convert among float16, bfloat16, float32 and float64.

    Rounds once, to nearest even. Values too large become infinite; NaN stays NaN; subnormals are kept.

    Parameters
    ----------
    dst, src : int
        Addresses of arrays that do not overlap (equal dtypes: or are the same).
    dst_dtype, src_dtype : int
        Codes of `pyhvd.dtypes`.
    count : int
        Elements.

    Raises
    ------
    ValueError
        For other dtypes and a negative count.
    """
    cdef Py_ssize_t touched = count * (pyhvd_itemsize(dst_dtype) + pyhvd_itemsize(src_dtype))
    _check_count(count, dst, src)
    state = _leave(touched)
    _enter(state, pyhvd_cast(<void*>dst, dst_dtype, <void*>src, src_dtype, <size_t>count))


def reduce(
    uintptr_t dst,
    const int64_t[::1] srcs not None,
    Py_ssize_t count,
    int dtype,
    int op,
    double factor=1.0,
):
    """Combine arrays element by element: ``dst = factor * (srcs[0] op srcs[1] op ...)``, in that order.

    float16 and bfloat16 are computed in float32, factor included, and rounded once at the end. Integers
    wrap. MIN and MAX give NaN where any source has one, and rank -0.0 below +0.0. For bool MIN and PRODUCT
    are "and", MAX is "or". The factor is applied as in `scale`.

    Parameters
    ----------
    dst : int
        Address of the result; exactly one of `srcs`, or of an array that overlaps none of them.
    srcs : int64 array, C-contiguous
        Addresses of the sources, at least one.
    count : int
        Elements in each.
    dtype, op : int
        Codes of `pyhvd.dtypes`. AVERAGE is SUM: the divisor belongs in `factor`.
    factor : float
        Multiplies the result; 1.0 leaves its bits alone.

    Raises
    ------
    ValueError
        For unknown codes, a combination that is not defined (ADASUM; SUM or a factor with bool; MIN and
        MAX with complex), no sources, and a negative count.
    """
    cdef Py_ssize_t p = srcs.shape[0], k, touched = count * (p + 1) * pyhvd_itemsize(dtype)
    for k in range(p):
        _check_count(count, dst, <uintptr_t>srcs[k])
    state = _leave(touched)
    _enter(state, pyhvd_reduce(<void*>dst, &srcs[0], <size_t>p, <size_t>count, dtype, op, factor))


def fill(uintptr_t dst, Py_ssize_t count, int dtype, int op):
    """Write the neutral element of an op: reducing with it changes no bit.

    SUM and AVERAGE: -0.0 (the true neutral: ``-0.0 + 0.0`` is ``0.0``), and 0 for integers. MIN: infinity,
    the largest integer, True. MAX: -infinity, the smallest integer, False. PRODUCT: 1, which for complex
    numbers is neutral only up to the sign of zeros and for finite values.

    Parameters
    ----------
    dst : int
        Address.
    count : int
        Elements.
    dtype, op : int
        Codes of `pyhvd.dtypes`.

    Raises
    ------
    ValueError
        For unknown codes, a combination that is not defined, and a negative count.
    """
    cdef Py_ssize_t touched = count * pyhvd_itemsize(dtype)
    _check_count(count, dst, dst)
    state = _leave(touched)
    _enter(state, pyhvd_fill(<void*>dst, <size_t>count, dtype, op))


cdef Py_ssize_t _check_adasum(uintptr_t a, uintptr_t b, const int64_t[::1] counts, Py_ssize_t rows,
                              int dtype) except -1:
    """Return the bytes of one vector."""
    cdef Py_ssize_t total = _check_pieces(counts, counts), size = pyhvd_itemsize(dtype)
    if rows != counts.shape[0]:
        raise ValueError(f"{rows} rows, but {counts.shape[0]} counts")
    _check_count(total, a, b)
    return total * size


def adasum_terms(
    double[:, ::1] terms not None, uintptr_t a, uintptr_t b, const int64_t[::1] counts not None, int dtype
):
    """Write a row for each piece of two vectors: a . b, a . a and b . b, summed in float64.

    The order of the sums depends on the piece's count alone: eight lanes, folded at the end.

    Parameters
    ----------
    terms : float64 array of shape (n, 3), C-contiguous
        The result.
    a, b : int
        Addresses of the vectors, in which the pieces lie one behind the other.
    counts : int64 array of n, C-contiguous
        Elements in each piece.
    dtype : int
        Code of float32 or float64.

    Raises
    ------
    ValueError
        For other dtypes, shapes that do not belong together, and a negative count.
    """
    cdef Py_ssize_t n = counts.shape[0], touched = 2 * _check_adasum(a, b, counts, terms.shape[0], dtype)
    if terms.shape[1] != 3:
        raise ValueError(f"terms has {terms.shape[1]} columns, not 3")
    if n > 0:
        state = _leave(touched)
        _enter(state, pyhvd_adasum_terms(&terms[0, 0], <void*>a, <void*>b, &counts[0], <size_t>n, dtype))


def adasum_combine(
    uintptr_t dst,
    uintptr_t a,
    uintptr_t b,
    const int64_t[::1] counts not None,
    const double[:, ::1] factors not None,
    int dtype,
):
    """Combine two vectors piece by piece: ``dst = factors[i, 0] * a + factors[i, 1] * b``.

    Computed in float64 and rounded once.

    Parameters
    ----------
    dst, a, b : int
        Addresses of vectors in which the pieces lie one behind the other; `dst` is exactly `a` or `b`, or
        overlaps neither.
    counts : int64 array of n, C-contiguous
        Elements in each piece.
    factors : float64 array of shape (n, 2), C-contiguous
        Of each piece.
    dtype : int
        Code of float32 or float64.

    Raises
    ------
    ValueError
        For other dtypes, shapes that do not belong together, and a negative count.
    """
    cdef Py_ssize_t n = counts.shape[0], touched = 3 * _check_adasum(a, b, counts, factors.shape[0], dtype)
    if factors.shape[1] != 2:
        raise ValueError(f"factors has {factors.shape[1]} columns, not 2")
    _check_count(touched, dst, dst)
    if n > 0:
        state = _leave(touched)
        _enter(
            state,
            pyhvd_adasum_combine(
                <void*>dst, <void*>a, <void*>b, &counts[0], &factors[0, 0], <size_t>n, dtype
            ),
        )


def isa():
    """Name the way in which float16 is converted on this machine.

    Returns
    -------
    str
        "avx512", "f16c" or "portable"; all give the same bits.
    """
    return _PATHS[pyhvd_f16_path()]


def _f16_paths():
    """Return the names of the float16 paths that this machine has (for tests)."""
    return [name for path, name in enumerate(_PATHS) if pyhvd_f16_has(path)]


def _f16_widen(str path, uintptr_t dst, uintptr_t src, Py_ssize_t count):
    """Convert float16 to float32 by one of :func:`_f16_paths` (for tests)."""
    _check_count(count, dst, src)
    pyhvd_f16_widen(_PATHS.index(path), <float*>dst, <void*>src, <size_t>count)


def _f16_narrow(str path, uintptr_t dst, uintptr_t src, Py_ssize_t count):
    """Convert float32 to float16 by one of :func:`_f16_paths` (for tests)."""
    _check_count(count, dst, src)
    pyhvd_f16_narrow(_PATHS.index(path), <void*>dst, <float*>src, <size_t>count)
