/* The door of JAX: one handler of XLA's typed FFI for all collectives; calls.hpp has the rest.
 *
 * The operands and results of the custom call are those of the collective, in order. The last operand is a token,
 * which is not read. The attribute `key` (an int64) names the call. A handler that cannot complete at once returns a future, which the completer thread
 * completes; XLA keeps the buffers until then.
 *
 * The handler reports version 0.1 of the FFI: jaxlib refuses a version newer than its own, and all structures
 * that are used here have been the same since. */
#include "calls.hpp"

#include "xla_ffi/c_api.h"

namespace {

constexpr int REPORTED_MAJOR = 0, REPORTED_MINOR = 1;

XLA_FFI_Error *make_error(const XLA_FFI_Api *api, const std::string &text) {
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                      XLA_FFI_Error_Code_INTERNAL};
    return api->XLA_FFI_Error_Create(&args);
}

/* One run of a custom call. */
class JaxRun : public pyhvd_graph::Run {
  public:
    JaxRun(int64_t key, const XLA_FFI_Api *api) : Run(key), api_(api) {}

    void defer() override {
        XLA_FFI_Future_Create_Args args = {XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
        api_->XLA_FFI_Future_Create(&args);
        future_ = *deferred_ = args.future;
    }

    void finish() override {
        if (error().empty()) {
            XLA_FFI_Future_SetAvailable_Args args = {XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr,
                                                     future_};
            api_->XLA_FFI_Future_SetAvailable(&args);
        } else {
            XLA_FFI_Future_SetError_Args args = {XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future_,
                                                 make_error(api_, error())};
            api_->XLA_FFI_Future_SetError(&args);
        }
    }

    /* Where defer() leaves the future for the handler that returns it. */
    void leave_future_in(XLA_FFI_Future **place) { deferred_ = place; }

  private:
    const XLA_FFI_Api *api_;
    XLA_FFI_Future *future_ = nullptr;
    XLA_FFI_Future **deferred_ = nullptr;
};

/* Return an item's size in bytes; 0: pyhvd cannot send the type. */
int64_t itemsize(XLA_FFI_DataType type) {
    switch (type) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8: return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32: return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64: return 8;
    case XLA_FFI_DataType_C128: return 16;
    default: return 0;
    }
}

int64_t nbytes(const XLA_FFI_Buffer *buffer) {
    int64_t n = itemsize(buffer->dtype);
    for (int64_t d = 0; d < buffer->rank; d++) n *= buffer->dims[d];
    return n;
}

/* Read the attribute `key`; return whether there is one. */
bool read_key(const XLA_FFI_Attrs &attrs, int64_t *key) {
    for (int64_t k = 0; k < attrs.size; k++) {
        if (std::string(attrs.names[k]->ptr, attrs.names[k]->len) != "key") continue;
        if (attrs.types[k] != XLA_FFI_AttrType_SCALAR) return false;
        const XLA_FFI_Scalar *scalar = static_cast<const XLA_FFI_Scalar *>(attrs.attrs[k]);
        if (scalar->dtype != XLA_FFI_DataType_S64) return false;
        *key = *static_cast<const int64_t *>(scalar->value);
        return true;
    }
    return false;
}

/* Answer the call by which XLA asks for the handler's version; return whether it is one. */
bool answer_metadata(XLA_FFI_CallFrame *frame) {
    XLA_FFI_Extension_Base *extension = frame->extension_start;
    if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
    XLA_FFI_Metadata *metadata = reinterpret_cast<XLA_FFI_Metadata_Extension *>(extension)->metadata;
    metadata->api_version.major_version = REPORTED_MAJOR;
    metadata->api_version.minor_version = REPORTED_MINOR;
    metadata->traits = 0;
    return true;
}

XLA_FFI_Error *run_collective(XLA_FFI_CallFrame *frame) {
    if (answer_metadata(frame)) return nullptr;
    int64_t key;
    if (!read_key(frame->attrs, &key)) return make_error(frame->api, "the collective has no int64 attribute `key`");
    auto run = std::make_unique<JaxRun>(key, frame->api);
    for (int64_t k = 0; k + 1 < frame->args.size; k++) {
        const auto *source = static_cast<const XLA_FFI_Buffer *>(frame->args.args[k]);
        run->add_source(source->data, source->rank, source->dims, nbytes(source));
    }
    for (int64_t k = 0; k < frame->rets.size; k++) {
        const auto *target = static_cast<const XLA_FFI_Buffer *>(frame->rets.rets[k]);
        run->add_target(target->data, nbytes(target));
    }
    run->leave_future_in(&frame->future);
    std::unique_ptr<pyhvd_graph::Run> held = std::move(run);
    if (pyhvd_graph::start(held) == pyhvd_graph::Started::later) return nullptr;
    return held->error().empty() ? nullptr : make_error(frame->api, held->error());
}

/* It does nothing. It has a side effect for XLA, which therefore keeps the collective whose result it takes. */
XLA_FFI_Error *keep_collective(XLA_FFI_CallFrame *frame) {
    answer_metadata(frame);
    return nullptr;
}

/* handler(): the handler's address in a capsule, for jax.ffi.register_ffi_target. */
PyObject *method_handler(PyObject *, PyObject *) {
    return PyCapsule_New(reinterpret_cast<void *>(&run_collective), nullptr, nullptr);
}

/* keeper(): likewise the keeper's. */
PyObject *method_keeper(PyObject *, PyObject *) {
    return PyCapsule_New(reinterpret_cast<void *>(&keep_collective), nullptr, nullptr);
}

PyMethodDef methods[] = {
    PYHVD_GRAPH_METHODS,
    {"keeper", method_keeper, METH_NOARGS, nullptr},
    {"handler", method_handler, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "pyhvd.native._jax_ops", nullptr, -1, methods,
                          nullptr,               nullptr,                 nullptr, nullptr};

} /* namespace */

PyMODINIT_FUNC PyInit__jax_ops() { return pyhvd_graph::prepare_module(PyModule_Create(&definition)); }
