/* The door of TensorFlow: two ops for all collectives, by its C API for kernels; calls.hpp has the rest.
 *
 * tf.load_op_library() loads this file, before Python imports it as a module: the ops are registered while it
 * is loaded. It links nothing of TensorFlow, and needs none of its headers: the functions are found by name in
 * the library that the program has loaded. Both ops have attributes `key` (a call), `T` and `Tout` (the dtypes
 * of operands and results).
 *
 * PyhvdSameShapes   each result has the shape of its operand, and its memory if nobody else needs that.
 * PyhvdOtherShapes  the attribute `rows` has a number for each result: its length in dimension 0, where all
 *                   other dimensions are those of the operand; or -1: the ranks decide its shape.
 *
 * Both are stateful: so each runs once per step, also with constant operands or unused results.
 *
 * Memory. The tensors of operands and results belong to the context, which lives until the done callback is
 * called. TensorFlow passes the address of a std::function that dies when the kernel's function returns: it is
 * copied. */
#include "calls.hpp"

#include <dlfcn.h>

#include <functional>

/* ---- what this file uses of TensorFlow's C API: tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h ---- */

struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
struct TF_Status;
struct TF_Tensor;
using DoneCallback = std::function<void()>;

namespace {

constexpr int OK = 0, INTERNAL = 13; /* TF_Code */

/* Result, name without TF_, arguments. */
#define FUNCTIONS(F)                                                                           \
    F(TF_Status *, NewStatus, ())                                                              \
    F(void, DeleteStatus, (TF_Status *))                                                       \
    F(void, SetStatus, (TF_Status *, int, const char *))                                       \
    F(int, GetCode, (const TF_Status *))                                                       \
    F(void, DeleteTensor, (TF_Tensor *))                                                       \
    F(int, NumDims, (const TF_Tensor *))                                                       \
    F(int64_t, Dim, (const TF_Tensor *, int))                                                  \
    F(size_t, TensorByteSize, (const TF_Tensor *))                                             \
    F(void *, TensorData, (const TF_Tensor *))                                                 \
    F(TF_OpDefinitionBuilder *, NewOpDefinitionBuilder, (const char *))                        \
    F(void, RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                     \
    F(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *))              \
    F(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *))             \
    F(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *))            \
    F(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, bool))                \
    F(void, OpDefinitionBuilderSetShapeInferenceFunction,                                      \
      (TF_OpDefinitionBuilder *, void (*)(TF_ShapeInferenceContext *, TF_Status *)))           \
    F(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext *))                   \
    F(void, ShapeInferenceContextGetInput,                                                     \
      (TF_ShapeInferenceContext *, int, TF_ShapeHandle *, TF_Status *))                        \
    F(void, ShapeInferenceContextSetOutput,                                                    \
      (TF_ShapeInferenceContext *, int, TF_ShapeHandle *, TF_Status *))                        \
    F(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *))   \
    F(TF_ShapeHandle *, NewShapeHandle, ())                                                    \
    F(void, DeleteShapeHandle, (TF_ShapeHandle *))                                             \
    F(TF_KernelBuilder *, NewAsyncKernelBuilder,                                               \
      (const char *, const char *, void *(*)(TF_OpKernelConstruction *),                       \
       void (*)(void *, TF_OpKernelContext *, DoneCallback *), void (*)(void *)))              \
    F(void, KernelBuilder_HostMemory, (TF_KernelBuilder *, const char *))                      \
    F(void, RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))            \
    F(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))            \
    F(void, OpKernelConstruction_GetAttrSize,                                                  \
      (TF_OpKernelConstruction *, const char *, int32_t *, int32_t *, TF_Status *))            \
    F(void, OpKernelConstruction_GetAttrInt64,                                                 \
      (TF_OpKernelConstruction *, const char *, int64_t *, TF_Status *))                       \
    F(void, OpKernelConstruction_GetAttrInt64List,                                             \
      (TF_OpKernelConstruction *, const char *, int64_t *, int, TF_Status *))                  \
    F(int, NumInputs, (TF_OpKernelContext *))                                                  \
    F(int, NumOutputs, (TF_OpKernelContext *))                                                 \
    F(void, GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                  \
    F(int, ExpectedOutputDataType, (TF_OpKernelContext *, int))                                \
    F(TF_Tensor *, AllocateOutput,                                                             \
      (TF_OpKernelContext *, int, int, const int64_t *, int, size_t, TF_Status *))             \
    F(TF_Tensor *, ForwardInputOrAllocateOutput,                                               \
      (TF_OpKernelContext *, const int *, int, int, const int64_t *, int, int *, TF_Status *)) \
    F(void, OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))

struct Functions {
#define DECLARE(result, name, arguments) result(*name) arguments = nullptr;
    FUNCTIONS(DECLARE)
#undef DECLARE

    /* Find all functions; return whether each is there. */
    bool find() {
#ifdef __APPLE__
        const char *path = "libtensorflow_framework.2.dylib";
#else
        const char *path = "libtensorflow_framework.so.2";
#endif
        void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
        if (!library) return false;
        bool all = true;
#define FIND(result, name, arguments)                                          \
    name = reinterpret_cast<result(*) arguments>(dlsym(library, "TF_" #name)); \
    all = all && name;
        FUNCTIONS(FIND)
#undef FIND
        return all;
    }
};

Functions tf;

std::atomic<int64_t> forwarded_results{0}, allocated_results{0};

class Status {
  public:
    Status() : status_(tf.NewStatus()) {}
    ~Status() { tf.DeleteStatus(status_); }
    Status(const Status &) = delete;
    Status &operator=(const Status &) = delete;

    operator TF_Status *() { return status_; }
    bool ok() const { return tf.GetCode(status_) == OK; }

  private:
    TF_Status *status_;
};

/* One op of a graph. */
struct Kernel {
    int64_t key = 0;
    bool same_shapes = false;
    std::vector<int64_t> rows; /* of each result, unless the shapes are the same */
};

/* ---- one run of an op ---- */

class TensorFlowRun : public pyhvd_graph::Run {
  public:
    TensorFlowRun(int64_t key, TF_OpKernelContext *context, const DoneCallback &done)
        : Run(key), context_(context), done_(done) {}

    void *allocate(size_t k, const std::vector<int64_t> &dims, int64_t nbytes) override {
        Status status;
        TF_Tensor *made = tf.AllocateOutput(context_, (int)k,
                                            tf.ExpectedOutputDataType(context_, (int)k),
                                            dims.data(), (int)dims.size(), (size_t)nbytes, status);
        return take_address(made);
    }

    void finish() override {
        if (!error().empty()) fail(error().c_str());
        done_();
    }

    /* Add operands and results; return whether all could be, else the op has failed. */
    bool add_tensors(const Kernel *kernel) {
        int outputs = tf.NumOutputs(context_);
        for (int k = 0; k < tf.NumInputs(context_); k++) {
            std::vector<int64_t> dims;
            int64_t nbytes;
            if (!add_input(k, &dims, &nbytes)) return false;
            if (k < outputs && !add_output(kernel, k, dims, nbytes)) return false;
        }
        for (int k = tf.NumInputs(context_); k < outputs; k++) add_unsized_target();
        return true;
    }

  private:
    TF_OpKernelContext *const context_;
    const DoneCallback done_;

    void fail(const char *text) {
        Status status;
        tf.SetStatus(status, INTERNAL, text);
        tf.OpKernelContext_Failure(context_, status);
    }

    /* Return a tensor's address, and give its handle back: the context holds the tensor. */
    static void *take_address(TF_Tensor *tensor) {
        if (!tensor) return nullptr;
        void *data = tf.TensorData(tensor);
        tf.DeleteTensor(tensor);
        return data;
    }

    bool add_input(int k, std::vector<int64_t> *dims, int64_t *nbytes) {
        Status status;
        TF_Tensor *tensor = nullptr;
        tf.GetInput(context_, k, &tensor, status);
        if (!status.ok()) {
            tf.OpKernelContext_Failure(context_, status);
            return false;
        }
        for (int d = 0; d < tf.NumDims(tensor); d++) dims->push_back(tf.Dim(tensor, d));
        *nbytes = (int64_t)tf.TensorByteSize(tensor);
        /* With a second handle, its memory could not become the result's. */
        add_source(take_address(tensor), (int64_t)dims->size(), dims->data(), *nbytes);
        return true;
    }

    bool add_output(const Kernel *kernel, int k, std::vector<int64_t> dims, int64_t nbytes) {
        if (!kernel->same_shapes) {
            int64_t rows = kernel->rows[(size_t)k];
            if (rows < 0 || dims.empty()) {
                add_unsized_target();
                return true;
            }
            nbytes = dims[0] ? nbytes / dims[0] * rows : 0;
            dims[0] = rows;
        }
        Status status;
        int forwarded = -1;
        TF_Tensor *made = tf.ForwardInputOrAllocateOutput(context_, &k, kernel->same_shapes ? 1 : 0,
                                                          k, dims.data(), (int)dims.size(),
                                                          &forwarded, status);
        if (!status.ok()) {
            tf.OpKernelContext_Failure(context_, status);
            return false;
        }
        (forwarded == k ? forwarded_results : allocated_results)++;
        add_target(take_address(made), nbytes);
        return true;
    }
};

void run_collective(void *kernel, TF_OpKernelContext *context, DoneCallback *done) {
    const Kernel *own = static_cast<const Kernel *>(kernel);
    auto run = std::make_unique<TensorFlowRun>(own->key, context, *done);
    if (!run->add_tensors(own)) {
        (*done)();
        return;
    }
    std::unique_ptr<pyhvd_graph::Run> held = std::move(run);
    if (pyhvd_graph::start(held) == pyhvd_graph::Started::ended) held->finish();
}

/* ---- ops and kernels ---- */

void *make_kernel(TF_OpKernelConstruction *construction, bool same_shapes) {
    auto kernel = std::make_unique<Kernel>();
    kernel->same_shapes = same_shapes;
    Status status;
    tf.OpKernelConstruction_GetAttrInt64(construction, "key", &kernel->key, status);
    int32_t length = 0, total = 0;
    if (status.ok() && !same_shapes)
        tf.OpKernelConstruction_GetAttrSize(construction, "rows", &length, &total, status);
    kernel->rows.resize((size_t)length);
    if (status.ok() && length)
        tf.OpKernelConstruction_GetAttrInt64List(construction, "rows", kernel->rows.data(), length,
                                                 status);
    if (!status.ok()) tf.OpKernelConstruction_Failure(construction, status);
    return kernel.release();
}

void *make_same_shapes(TF_OpKernelConstruction *construction) {
    return make_kernel(construction, true);
}
void *make_other_shapes(TF_OpKernelConstruction *construction) {
    return make_kernel(construction, false);
}
void delete_kernel(void *kernel) { delete static_cast<Kernel *>(kernel); }

void infer_same_shapes(TF_ShapeInferenceContext *context, TF_Status *status) {
    TF_ShapeHandle *shape = tf.NewShapeHandle();
    for (int k = 0; k < tf.ShapeInferenceContextNumInputs(context) && tf.GetCode(status) == OK;
         k++) {
        tf.ShapeInferenceContextGetInput(context, k, shape, status);
        if (tf.GetCode(status) == OK) tf.ShapeInferenceContextSetOutput(context, k, shape, status);
    }
    tf.DeleteShapeHandle(shape);
}

void infer_other_shapes(TF_ShapeInferenceContext *context, TF_Status *status) {
    tf.ShapeInferenceContextSetUnknownShape(context, status);
}

void register_op(const char *name, bool same_shapes) {
    Status status;
    TF_OpDefinitionBuilder *op = tf.NewOpDefinitionBuilder(name);
    tf.OpDefinitionBuilderAddInput(op, "operands: T");
    tf.OpDefinitionBuilderAddOutput(op, "results: Tout");
    tf.OpDefinitionBuilderAddAttr(op, "key: int");
    tf.OpDefinitionBuilderAddAttr(op, "T: list(type) >= 0");
    tf.OpDefinitionBuilderAddAttr(op, "Tout: list(type) >= 0");
    if (!same_shapes) tf.OpDefinitionBuilderAddAttr(op, "rows: list(int) >= 0");
    tf.OpDefinitionBuilderSetIsStateful(op, true);
    tf.OpDefinitionBuilderSetShapeInferenceFunction(op, same_shapes ? infer_same_shapes
                                                                    : infer_other_shapes);
    tf.RegisterOpDefinition(op, status);
    for (const char *device : {"CPU", "GPU"}) {
        TF_KernelBuilder *kernel = tf.NewAsyncKernelBuilder(
            name, device, same_shapes ? make_same_shapes : make_other_shapes, run_collective,
            delete_kernel);
        if (device[0] ==
            'G') { /* TensorFlow copies; on a CPU results of host memory would not take other memory */
            tf.KernelBuilder_HostMemory(kernel, "operands");
            tf.KernelBuilder_HostMemory(kernel, "results");
        }
        tf.RegisterKernelBuilder(name, kernel, status);
    }
}

/* Runs when the library is loaded. Without TensorFlow, or with one that lacks a function, no op is registered;
 * Python notices that. */
__attribute__((constructor)) void register_ops() {
    if (!tf.find()) return;
    register_op("PyhvdSameShapes", true);
    register_op("PyhvdOtherShapes", false);
}

/* counts(): how many results have taken the memory of their operands, and how many new memory. */
PyObject *method_counts(PyObject *, PyObject *) {
    return Py_BuildValue("LL", (long long)forwarded_results, (long long)allocated_results);
}

PyMethodDef methods[] = {
    PYHVD_GRAPH_METHODS,
    {"counts", method_counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_tensorflow_ops",
                          nullptr,
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

} /* namespace */

PyMODINIT_FUNC PyInit__tensorflow_ops() {
    return pyhvd_graph::prepare_module(PyModule_Create(&definition));
}
