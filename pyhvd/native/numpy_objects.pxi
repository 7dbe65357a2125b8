# Reads lists and arrays through borrowed pointers; a part of shared_memory.pyx.
#
# A thousand objects are rarely in the cache. So they are prefetched, and only the necessary fields are read.

cdef enum:
    AHEAD = 8  # by how many arrays their shapes are prefetched


cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyArray "PyArrayObject":
        pass
    object PyArray_Empty(int nd, cnp.npy_intp* dims, void* descr, int fortran)
    bint PyArray_CheckExact(PyObject* array)
    void* PyArray_DESCR(PyArray* array)
    int PyArray_NDIM(PyArray* array)
    cnp.npy_intp* PyArray_DIMS(PyArray* array)
    void* PyArray_DATA(PyArray* array)
    bint PyArray_IS_C_CONTIGUOUS(PyArray* array)
    bint PyArray_ISWRITEABLE(PyArray* array)


cdef extern from "Python.h":
    PyObject* PyList_GET_ITEM(PyObject* items, Py_ssize_t k)
    PyObject** PySequence_Fast_ITEMS(PyObject* items)
    Py_ssize_t PySequence_Fast_GET_SIZE(PyObject* items)


cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    #define PYHVD_GIL 0
    #else
    #define PYHVD_GIL 1
    #endif
    """
    bint PYHVD_GIL  # whether no other thread can change a list while it is read


cdef inline void prefetch_all(PyObject* tensors) noexcept:
    """Prefetch the objects of a list or tuple."""
    cdef Py_ssize_t k
    if PYHVD_GIL:
        for k in range(PySequence_Fast_GET_SIZE(tensors)):
            prefetch(PySequence_Fast_ITEMS(tensors)[k])
