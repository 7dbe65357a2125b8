# Memory of numpy results, from the pool; a part of shared_memory.pyx.
#
# numpy lets a thread choose the functions by which an array gets and frees its memory (NEP 49). The array
# keeps them, so it owns its memory as any other does: https://numpy.org/neps/nep-0049.html

cdef extern from "results/pool.h" nogil:
    size_t POOL_LEAST "PYHVD_POOL_LEAST"

    ctypedef struct pyhvd_pool_counts:
        uint64_t kept
        uint64_t made
        uint64_t reused

    void pyhvd_pool_limit(uint64_t bytes)
    void* pyhvd_pool_take(size_t bytes)
    void pyhvd_pool_give(void* memory)
    size_t pyhvd_pool_room(const void* memory)
    pyhvd_pool_counts pyhvd_pool_read()


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


def limit_pool(uint64_t nbytes):
    """Keep at most so many bytes of freed results for later ones; 0: none."""
    pyhvd_pool_limit(nbytes)


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
