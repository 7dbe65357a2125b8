# Reads tensors of other libraries through DLPack's C functions; a part of shared_memory.pyx.
#
# DLPack 1.3 gives a tensor type a table of C functions, by which another extension reads and makes tensors
# without Python code: https://dmlc.github.io/dlpack/latest/python_spec.html. torch has it since 2.11.

cdef struct DLDevice:
    int32_t type
    int32_t id


cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes


cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset


cdef struct DLVersion:
    uint32_t major
    uint32_t minor


cdef struct DLManagedTensor:
    DLVersion version
    void* context
    void (*deleter)(DLManagedTensor*) noexcept
    uint64_t flags
    DLTensor tensor


ctypedef void (*DLSetError)(void* context, const char* kind, const char* message) noexcept


cdef struct DLFunctions:
    DLVersion version
    void* earlier
    int (*allocate)(DLTensor* like, DLManagedTensor** made, void* context, DLSetError set_error) noexcept
    int (*take)(void* tensor, DLManagedTensor** taken) noexcept
    int (*give)(DLManagedTensor* tensor, void** given) noexcept
    int (*look)(PyObject* tensor, DLTensor* seen) noexcept
    int (*current_stream)(int32_t device, int32_t id, void** stream) noexcept


cdef struct PooledTensor:
    # A tensor in the pool's memory, until its library frees it.
    DLManagedTensor managed
    int64_t[32] shape
    int64_t[32] strides


cdef void free_pooled(DLManagedTensor* tensor) noexcept nogil:
    # Any thread may call it, also when Python has ended.
    pyhvd_pool_give(tensor.tensor.data)
    free(tensor)


cdef enum:
    DL_CPU = 1
    DL_COMPLEX = 5


# DLPack's code and bits of each dtype, by its code in pyhvd.dtypes.
cdef uint8_t[15][2] DL_TYPES = [
    [1, 8], [0, 8], [1, 16], [0, 16], [0, 32], [0, 64], [2, 16], [2, 32], [2, 64], [6, 8], [4, 16],
    [1, 32], [1, 64], [5, 64], [5, 128],
]


cdef class TensorType:
    """How to read and make tensors of one type."""

    cdef object library
    cdef object note_changes
    cdef dict forward_mode
    cdef DLFunctions* functions  # NULL: the library has none

    cdef bint look(self, PyObject* tensor, DLTensor* seen, int64_t* shape, int64_t* strides) except -1:
        """Read a tensor in host memory; ``shape`` and ``strides`` have room for 32 dimensions.

        Return False if another tensor is needed, such as a conjugated one, or if it may have a tangent.
        """
        cdef object described
        cdef Py_ssize_t d
        if <int>self.forward_mode.get("_current_level", -1) >= 0:
            return False
        if self.functions != NULL:
            if self.functions.look(tensor, seen) < 0:
                PyErr_Clear()
                return False
            if seen.device.type != DL_CPU:
                return False
            if seen.dtype.code == DL_COMPLEX:
                return not (<object>tensor).is_conj()
            return True
        described = self.library.describe(<object>tensor)
        if described is None or len(described[2]) > 32:
            return False
        seen.data = <void*><uintptr_t>described[0]
        seen.byte_offset = 0
        seen.ndim = <int32_t>len(described[2])
        seen.dtype = DLDataType(DL_TYPES[described[1]][0], DL_TYPES[described[1]][1], 1)
        seen.shape = shape
        seen.strides = strides
        for d in range(seen.ndim):
            shape[d] = described[2][d]
            strides[d] = described[3][d]
        return True

    cdef bint suits(self, CachedTensor cached, PyObject* tensor, bint inplace, int64_t* address) except -1:
        """Return whether a tensor is like the cached one; if so, store its address."""
        cdef DLTensor seen
        cdef int64_t[32] shape
        cdef int64_t[32] strides
        cdef int64_t count = 1
        cdef bint may_be_negated
        cdef int d
        if not self.look(tensor, &seen, shape, strides) or seen.ndim != cached.ndim:
            return False
        if seen.dtype.code != DL_TYPES[cached.code][0] or seen.dtype.bits != DL_TYPES[cached.code][1]:
            return False
        for d in range(seen.ndim):
            if seen.shape[d] != cached.dims[d]:
                return False
            count *= seen.shape[d]
        may_be_negated = seen.ndim == 0
        for d in range(seen.ndim):
            if seen.strides[d] != cached.strides[d] and count > 0:
                if seen.shape[d] > 1:
                    return False
                may_be_negated = True
        # A negated tensor is the imaginary part of a conjugated one: its elements are not neighbours.
        if may_be_negated and count == 1 and (<object>tensor).is_neg():
            return False
        if inplace and (<object>tensor).requires_grad:
            return False
        if seen.data == NULL and count > 0:
            return False
        address[0] = <int64_t>seen.data + <int64_t>seen.byte_offset
        return True

    cdef bint can_take(self, CachedTensor cached, PyObject* tensor, int64_t* address) except -1:
        """Return whether a tensor can take the cached one's result; if so, store its address."""
        cdef DLTensor seen
        cdef int64_t[32] shape
        cdef int64_t[32] strides
        cdef int64_t step = 1
        cdef int d
        if not self.look(tensor, &seen, shape, strides) or seen.ndim != cached.ndim or cached.layout:
            return False
        if seen.dtype.code != DL_TYPES[cached.code][0] or seen.dtype.bits != DL_TYPES[cached.code][1]:
            return False
        for d in reversed(range(seen.ndim)):
            if seen.shape[d] != cached.result_dims[d] or (seen.strides[d] != step and seen.shape[d] > 1):
                return False
            step *= seen.shape[d]
        if step <= 1 or seen.data == NULL:  # a single element may be negated
            return False
        address[0] = <int64_t>seen.data + <int64_t>seen.byte_offset
        return True

    cdef object empty_like(self, CachedTensor cached, PyObject* tensor, int64_t* address):
        """Return a new tensor, and store its address; return None if it must be made elsewhere."""
        cdef DLTensor like
        cdef object result
        if self.functions == NULL and cached.plan.rows >= 0:
            return None
        if self.functions == NULL or (cached.layout and cached.result_bytes < _POOL_LEAST):
            try:
                result = self.library.make_like(<object>tensor, cached.layout)
            except MemoryError:
                return None
            if result is None:
                return None
            address[0] = <int64_t>result.data_ptr()
            return result
        memset(&like, 0, sizeof(like))
        like.ndim = cached.ndim
        like.dtype = DLDataType(DL_TYPES[cached.code][0], DL_TYPES[cached.code][1], 1)
        like.shape = <int64_t*>cached.result_dims
        if cached.layout:
            like.strides = cached.strides
        return self.make(&like, cached.result_bytes, address)

    cdef object make(self, DLTensor* like, size_t nbytes, int64_t* address):
        """Return a new tensor in host memory, and store its address; None without memory.

        A large one has the pool's. A small one is contiguous, whatever the strides.
        """
        cdef DLManagedTensor* made = NULL
        like.device.type = DL_CPU
        if nbytes >= _POOL_LEAST:
            made = pooled_tensor(like, nbytes, self.functions.version)
            return None if made == NULL else self.given(made, address)
        if self.functions.allocate(like, &made, NULL, &_no_memory) < 0:
            PyErr_Clear()
            return None
        return self.given(made, address)

    cdef object given(self, DLManagedTensor* made, int64_t* address):
        """Return the tensor that the library makes of ``made``, and store its address."""
        cdef PyObject* given = NULL
        cdef object result
        address[0] = <int64_t>made.tensor.data + <int64_t>made.tensor.byte_offset
        if self.functions.give(made, <void**>&given) < 0:
            raise
        result = <object>given
        Py_DECREF(result)
        return result


cdef DLManagedTensor* pooled_tensor(const DLTensor* like, size_t nbytes, DLVersion version) noexcept:
    """Return a tensor in the pool's memory; NULL if there is none. Without strides it is contiguous."""
    cdef PooledTensor* made = <PooledTensor*>calloc(1, sizeof(PooledTensor))
    cdef DLTensor* tensor
    cdef int64_t step = 1
    cdef int d
    if made == NULL:
        return NULL
    tensor = &made.managed.tensor
    tensor.data = pyhvd_pool_take(nbytes)
    if tensor.data == NULL:
        free(made)
        return NULL
    made.managed.version = version
    made.managed.deleter = free_pooled
    tensor.device, tensor.ndim, tensor.dtype = like.device, like.ndim, like.dtype
    tensor.shape, tensor.strides = made.shape, made.strides
    for d in reversed(range(like.ndim)):
        made.shape[d] = like.shape[d]
        made.strides[d] = step if like.strides == NULL else like.strides[d]
        step *= made.shape[d]
    return &made.managed


cdef void _no_memory(void* context, const char* kind, const char* message) noexcept:
    """Say nothing: the call goes by message, which says why there is none."""


cdef dict _tensor_types = {}


def know_tensor_types(types, capsule, library):
    """Let the fast path take tensors of these types, which are all of one library.

    Parameters
    ----------
    types : sequence of type
        The types; their subclasses go by message.
    capsule : object
        Their ``__dlpack_c_exchange_api__``, or None if they have none of version 1.
    library : TensorLibrary
        Does what the table cannot do, or all if there is none.
    """
    cdef TensorType known = TensorType.__new__(TensorType)
    known.library, known.note_changes = library, library.note_changes
    known.forward_mode = library.forward_mode
    if capsule is not None:
        known.functions = <DLFunctions*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        if known.functions.version.major != 1 or known.functions.look == NULL:
            known.functions = NULL
    for each in types:
        _tensor_types[each] = known
