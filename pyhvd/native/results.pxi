# Memory of large results, from the pool; a part of shared_memory.pyx. Results below POOL_LEAST bytes have
# that of their library. Those of torch get theirs in tensors.pxi.
#
# numpy lets a thread choose the functions by which an array gets and frees its memory (NEP 49). The array
# keeps them, so it owns its memory as any other does: https://numpy.org/neps/nep-0049.html

cdef extern from "results/pool.h" nogil:
    size_t _POOL_LEAST "PYHVD_POOL_LEAST"

    ctypedef struct pyhvd_pool_counts:
        uint64_t kept
        uint64_t made
        uint64_t reused

    void pyhvd_pool_limit(uint64_t bytes)
    void* pyhvd_pool_take(size_t bytes)
    void pyhvd_pool_give(void* memory)
    size_t pyhvd_pool_room(const void* memory)
    pyhvd_pool_counts pyhvd_pool_read()
    void pyhvd_pool_open(uint64_t bytes)
    void pyhvd_pool_close()
    int64_t pyhvd_pool_tidy(int64_t now)


cdef extern from "kernels/kernels.h" nogil:
    size_t pyhvd_itemsize(int dtype)  # 0 for an unknown code


cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyDataMemAllocator:
        void* ctx
        void* (*malloc)(void* ctx, size_t size) noexcept
        void* (*calloc)(void* ctx, size_t count, size_t size) noexcept
        void* (*realloc)(void* ctx, void* memory, size_t size) noexcept
        void (*free)(void* ctx, void* memory, size_t size) noexcept

    ctypedef struct PyDataMem_Handler:
        char name[127]
        uint8_t version
        PyDataMemAllocator allocator

    object PyDataMem_SetHandler(object handler)


cdef void* pool_malloc(void* ctx, size_t size) noexcept nogil:
    return pyhvd_pool_take(size)


cdef void* pool_calloc(void* ctx, size_t count, size_t size) noexcept nogil:
    cdef void* memory = pyhvd_pool_take(count * size)
    if memory != NULL:
        memset(memory, 0, count * size)
    return memory


cdef void* pool_realloc(void* ctx, void* memory, size_t size) noexcept nogil:
    cdef void* larger
    if memory != NULL and pyhvd_pool_room(memory) >= size:
        return memory
    larger = pyhvd_pool_take(size)
    if larger != NULL and memory != NULL:
        memcpy(larger, memory, pyhvd_pool_room(memory))
        pyhvd_pool_give(memory)
    return larger


cdef void pool_free(void* ctx, void* memory, size_t size) noexcept nogil:
    pyhvd_pool_give(memory)


cdef PyDataMem_Handler _pool_handler
memcpy(_pool_handler.name, <const char*>b"pyhvd", 6)
_pool_handler.version = 1
_pool_handler.allocator.malloc = pool_malloc
_pool_handler.allocator.calloc = pool_calloc
_pool_handler.allocator.realloc = pool_realloc
_pool_handler.allocator.free = pool_free
cdef object _pool = PyCapsule_New(&_pool_handler, "mem_handler", NULL)


POOL_LEAST = _POOL_LEAST


def limit_pool(uint64_t nbytes):
    """Keep at most so many bytes of freed results for later ones; 0: none."""
    pyhvd_pool_limit(nbytes)


def open_pool(uint64_t nbytes):
    """Let a rank of this process use the pool, and limit it, until :func:`close_pool`."""
    pyhvd_pool_open(nbytes)


def close_pool():
    """End one rank's use; the last one frees what is kept, and results that are freed later."""
    pyhvd_pool_close()


def tidy_pool(int64_t now):
    """Free what was given back 10 s before ``now`` (monotonic ns) or earlier.

    Return when (ns) to call again; 0: there is no result in the pool's memory, and none is kept.
    """
    return pyhvd_pool_tidy(now)


def pool_counts():
    """Return (bytes kept, results in new memory, results in kept memory) of this process."""
    cdef pyhvd_pool_counts counts = pyhvd_pool_read()
    return counts.kept, counts.made, counts.reused


cdef object pooled_array(int ndim, cnp.npy_intp* dims, object dtype):
    """Return a new array in the pool's memory."""
    cdef object before = PyDataMem_SetHandler(_pool)
    Py_INCREF(dtype)  # PyArray_Empty steals a reference
    try:
        return PyArray_Empty(ndim, dims, <void*>dtype, 0)
    finally:
        PyDataMem_SetHandler(before)


def pooled(shape, dtype):
    """Return a new array in the pool's memory; ``dtype`` is a numpy.dtype."""
    cdef cnp.npy_intp[64] dims
    cdef Py_ssize_t d
    for d, length in enumerate(shape):
        dims[d] = length
    return pooled_array(<int>len(shape), dims, dtype)
