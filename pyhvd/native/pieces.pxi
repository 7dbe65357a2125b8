# Lists of tensors that a call sends or receives as one memory; a part of shared_memory.pyx.

cdef extern from "Python.h":
    PyObject* PyTuple_GET_ITEM(PyObject* tuple, Py_ssize_t index)


cdef class Pieces:
    """The memory of several contiguous tensors of one dtype, in host memory."""

    cdef tuple tensors  # keeps the memory
    cdef TensorType kind
    cdef DLDataType dtype
    cdef Py_ssize_t n
    cdef int64_t* addresses
    cdef size_t* sizes  # in bytes
    cdef size_t nbytes

    def __dealloc__(self):
        PyMem_Free(self.addresses)
        PyMem_Free(self.sizes)

    cdef bint look(self, object tensors) except -1:
        """Read the tensors; return False if there are none, or if one is not plain."""
        cdef Py_ssize_t k
        self.tensors = tuple(tensors)
        self.n = len(self.tensors)
        self.addresses = <int64_t*>PyMem_Calloc(self.n, sizeof(int64_t))
        self.sizes = <size_t*>PyMem_Calloc(self.n, sizeof(size_t))
        if self.addresses == NULL or self.sizes == NULL:
            raise MemoryError
        for k in range(self.n):
            if not self.look_at(k, PyTuple_GET_ITEM(<PyObject*>self.tensors, k)):
                return False
            self.nbytes += self.sizes[k]
        return self.n > 0

    cdef bint look_at(self, Py_ssize_t k, PyObject* tensor) except -1:
        cdef TensorType kind = <TensorType>_tensor_types.get(type(<object>tensor))
        cdef DLTensor seen
        cdef int64_t[32] shape
        cdef int64_t[32] strides
        cdef int64_t count = 1
        cdef int d
        if kind is None or not kind.look(tensor, &seen, shape, strides):
            return False
        for d in reversed(range(seen.ndim)):
            if seen.strides[d] != count and seen.shape[d] > 1:
                return False
            count *= seen.shape[d]
        if k == 0:
            self.kind, self.dtype = kind, seen.dtype
        if seen.dtype.code != self.dtype.code or seen.dtype.bits != self.dtype.bits:
            return False
        # A negated tensor is the imaginary part of a conjugated one: it is contiguous with one element only.
        if (count == 1 and (<object>tensor).is_neg()) or (count and seen.data == NULL):
            return False
        self.addresses[k] = <int64_t>seen.data + <int64_t>seen.byte_offset
        self.sizes[k] = <size_t>count * ((seen.dtype.bits + 7) // 8)
        return True

    cdef bint are_neighbours(self) noexcept:
        """Return whether each begins where the one before ends."""
        cdef Py_ssize_t k
        for k in range(1, self.n):
            if self.addresses[k] != self.addresses[k - 1] + <int64_t>self.sizes[k - 1]:
                return False
        return True

    cdef void copy(self, int64_t whole, bint packs) noexcept nogil:
        """Copy all of them to the memory at ``whole``; unless it ``packs``, from there."""
        cdef Py_ssize_t k
        for k in range(self.n):
            if packs:
                memcpy(<void*>whole, <void*>self.addresses[k], self.sizes[k])
            else:
                memcpy(<void*>self.addresses[k], <void*>whole, self.sizes[k])
            whole += <int64_t>self.sizes[k]


def are_neighbours(tensors):
    """Return whether contiguous tensors of one dtype lie one behind the other; memory may yet be several."""
    cdef Pieces pieces = Pieces.__new__(Pieces)
    return pieces.look(tensors) and pieces.are_neighbours()


def pack(tensors):
    """Return a new tensor of one dimension with the elements of several.

    Return None if their library must make it.
    """
    cdef Pieces pieces = Pieces.__new__(Pieces)
    cdef DLTensor like
    cdef int64_t count
    cdef int64_t address = 0
    cdef object made
    if not pieces.look(tensors) or pieces.kind.functions == NULL or not pieces.nbytes:
        return None
    memset(&like, 0, sizeof(like))
    count = <int64_t>(pieces.nbytes // ((pieces.dtype.bits + 7) // 8))
    like.ndim, like.dtype, like.shape = 1, pieces.dtype, &count
    made = pieces.kind.make(&like, pieces.nbytes, &address)
    if made is not None:
        with nogil:
            pieces.copy(address, True)
    return made


def unpack(whole, tensors):
    """Store the elements of a contiguous tensor in several, one after the other.

    Return False, and store nothing, if their library must do it, or if they have another number of bytes.
    """
    cdef Pieces source = Pieces.__new__(Pieces)
    cdef Pieces pieces = Pieces.__new__(Pieces)
    if not source.look((whole,)) or not pieces.look(tensors) or source.nbytes != pieces.nbytes:
        return False
    with nogil:
        pieces.copy(source.addresses[0], False)
    return True
