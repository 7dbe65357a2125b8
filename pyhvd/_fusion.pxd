"""The kernels for other Cython modules: plain addresses, no checks beyond the table of dtypes and ops.

Each returns 0, or -1 for a combination that is not defined (no memory was touched then).
"""

from libc.stdint cimport int64_t


cdef int c_pack(void* dst, const int64_t* ptrs, const int64_t* counts, Py_ssize_t n, int dtype, int op,
                double factor) noexcept nogil
cdef int c_unpack(const void* src, const int64_t* ptrs, const int64_t* counts, Py_ssize_t n,
                  int dtype) noexcept nogil
cdef int c_scale(void* dst, const void* src, Py_ssize_t count, int dtype, double factor) noexcept nogil
cdef int c_cast(void* dst, int dst_dtype, const void* src, int src_dtype, Py_ssize_t count) noexcept nogil
cdef int c_reduce(void* dst, const int64_t* srcs, Py_ssize_t p, Py_ssize_t count, int dtype, int op,
                  double factor) noexcept nogil
cdef int c_fill(void* dst, Py_ssize_t count, int dtype, int op) noexcept nogil
cdef Py_ssize_t c_itemsize(int dtype) noexcept nogil
