/* Collectives inside of compiled graphs: the part that the doors of TensorFlow and JAX share.
 *
 * A *door* is the C++ file that a framework calls when a collective of a graph runs. This header submits the
 * collective, helps it along, and completes it. It includes nothing of a framework. Each extension module that
 * includes it has a table, a completer thread and counts of its own.
 *
 * Use by a door
 * -------------
 * 1. Module. `PyInit__..._ops` calls PyModule_Create with a PyModuleDef whose m_methods are PYHVD_GRAPH_METHODS
 *    (entries of an array; add own ones before the sentinel), then pyhvd_graph::prepare_module(module). Python's
 *    class pyhvd.frameworks.door.NativeDoor calls these methods; no other code does.
 * 2. Trace time. Python's NativeDoor.add(call) returns the key of a call site, an int64 attribute of the op.
 * 3. Run time. The handler, without the GIL, makes an object of a class that derives from Run:
 *
 *        auto run = std::make_unique<MyRun>(key, ...);
 *        run->add_source(data, rank, dims, nbytes);      // each operand, in order
 *        run->add_target(data, nbytes);                  // each result, in order; may be its source
 *        run->add_unsized_target();                      // or: a result whose shape the ranks decide
 *        std::unique_ptr<Run> held = std::move(run);
 *        if (start(held) == Started::ended) held->finish();   // `held` is still the handler's
 *        else ...                                             // `held` is empty
 *
 *    Operands are row-major, without gaps. Memory stays valid until finish().
 * 4. start() never blocks for other ranks. It helps for at most PYHVD_GRAPH_WAIT milliseconds, and only if no
 *    other run is under way. Then it returns Started::later; before, in the same thread, it calls
 *    run->defer(), where XLA's door makes its future.
 * 5. After Started::later the completer thread calls run->finish() once and deletes the run. finish() runs the
 *    rest of the graph, without the GIL, never on a thread of pyhvd's runtime. It reads run->error(): empty
 *    after a success.
 * 6. For unsized targets run->allocate(k, dims, nbytes) is called before finish(), in the same thread; it
 *    returns memory, or NULL, which fails the run.
 *
 * Threads. All functions may be called from any thread. Runs of one key must not overlap: the second one fails
 * with DuplicateNameError's text.
 */
#ifndef PYHVD_GRAPH_CALLS_HPP
#define PYHVD_GRAPH_CALLS_HPP

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pyhvd.h>

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pyhvd_graph {

enum class Started {
    ended, /* the run has ended, and start()'s caller owns it */
    later, /* the completer thread will call finish() */
};

/* ---- the table of calls ---- */

/* One call site of a graph. Never deleted: compiled programs keep its key. */
class Call {
  public:
    Call(std::string site, bool by_python) : site(std::move(site)), by_python(by_python) {}

    /* Return the id by which C code submits operands of this layout, or 0. */
    pyhvd_call_id id_for(const std::vector<int64_t> &layout) {
        std::lock_guard<std::mutex> lock(mutex_);
        return id_ && layout == layout_ ? id_ : 0;
    }

    void learn(pyhvd_call_id id, const std::vector<int64_t> &layout) {
        std::lock_guard<std::mutex> lock(mutex_);
        id_ = id;
        layout_ = layout;
    }

    /* Forget a stale id, unless another thread has learned a new one. */
    void forget(pyhvd_call_id id) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (id_ == id) id_ = 0;
    }

    const std::string site;
    const bool by_python; /* whether C code must not submit it */

  private:
    std::mutex mutex_;
    pyhvd_call_id id_ = 0;
    std::vector<int64_t> layout_;
};

/* ---- one run of a call ---- */

class Run {
  public:
    explicit Run(int64_t key) : key_(key) {}
    virtual ~Run() = default;
    Run(const Run &) = delete;
    Run &operator=(const Run &) = delete;

    void add_source(const void *data, int64_t rank, const int64_t *dims, int64_t nbytes) {
        sources_.push_back(data);
        source_bytes_.push_back(nbytes);
        layout_.push_back(rank);
        layout_.insert(layout_.end(), dims, dims + rank);
    }

    void add_target(void *data, int64_t nbytes) {
        targets_.push_back(data);
        target_bytes_.push_back(nbytes);
    }

    void add_unsized_target() {
        add_target(nullptr, UNSIZED);
        has_unsized_ = true;
    }

    /* Called by start() before it returns Started::later. */
    virtual void defer() {}

    /* Return memory for the k-th result, whose target is unsized; NULL: there is none. */
    virtual void *allocate(size_t, const std::vector<int64_t> &, int64_t) { return nullptr; }

    /* Tell the framework that the run has ended. */
    virtual void finish() = 0;

    /* What finish() reports: empty, or the text of the error with its call site. */
    const std::string &error() const { return error_; }

  private:
    friend struct Running;
    static constexpr int64_t UNSIZED = -1;
    enum { HELPED, LEFT, ENDED };
    struct Output {
        const void *data;
        int64_t nbytes;
        std::vector<int64_t> dims;
    };

    const int64_t key_;
    std::vector<const void *> sources_;
    std::vector<void *> targets_;
    std::vector<int64_t> source_bytes_, target_bytes_;
    std::vector<int64_t> layout_; /* of all sources: rank, dims, rank, dims, ... */
    bool has_unsized_ = false;
    Call *call_ = nullptr;
    pyhvd_call_id id_ = 0; /* with which C code has submitted it; else 0 */
    /* The thread that ends the run writes these before it sets `state_`. */
    std::string error_;
    std::vector<Output> outputs_; /* of Python, in memory of `keep_` */
    PyObject *keep_ = nullptr;
    std::atomic<int> state_{HELPED};
};

/* ---- what an extension module has once ---- */

struct Module {
    std::atomic<const pyhvd_c_api *> api{nullptr};
    std::atomic<PyObject *> submit{nullptr}; /* Python's NativeDoor._submit; never released */
    std::atomic<int64_t> wait_ns{0};
    std::atomic<int64_t> under_way{0}; /* runs that have begun and have not finished */
    std::atomic<int64_t> inside{0};    /* threads that may take the GIL */
    std::atomic<bool> closed{false};   /* the interpreter is ending */
    std::atomic<pid_t> process{0};

    std::mutex calls_mutex;
    std::unordered_map<int64_t, std::unique_ptr<Call>> calls;

    std::mutex errors_mutex;
    std::deque<std::string> errors; /* texts of the last errors, without call sites */

    /* Runs for the completer thread, which waits on these until the process ends. */
    std::mutex ended_mutex;
    std::condition_variable ended_changed;
    std::deque<Run *> ended;
    bool has_completer = false;
};

/* Return the module's state. It is never destroyed: glibc waits forever for the waiters of a condition
 * variable that is destroyed at exit. */
inline Module &module() {
    static Module *made = new Module;
    return *made;
}

inline void keep_error(const std::string &text) {
    Module &m = module();
    std::lock_guard<std::mutex> lock(m.errors_mutex);
    m.errors.push_back(text);
    if (m.errors.size() > 64) m.errors.pop_front();
}

/* Holds the GIL, if the interpreter is not ending; test it. */
class Gil {
  public:
    Gil() {
        module().inside++;
        taken_ = !module().closed;
        if (taken_) state_ = PyGILState_Ensure();
    }
    ~Gil() {
        if (taken_) PyGILState_Release(state_);
        module().inside--;
    }
    explicit operator bool() const { return taken_; }

  private:
    bool taken_;
    PyGILState_STATE state_ = PyGILState_LOCKED;
};

/* ---- the steps of a run ---- */

struct Running {
    /* -- its end -- */

    /* End a run with an error, or NULL; the caller no longer uses the run. */
    static void end(Run *run, const char *error) {
        if (error) run->error_ = *error ? error : "the collective failed";
        if (run->state_.exchange(Run::ENDED, std::memory_order_acq_rel) == Run::LEFT) complete(run);
    }

    /* pyhvd.h's done function. */
    static void note_end(void *context, const char *error) { end(static_cast<Run *>(context), error); }

    static bool has_ended(const Run *run) {
        return run->state_.load(std::memory_order_acquire) == Run::ENDED;
    }

    /* Hand an ended run to the completer thread. */
    static void complete(Run *run) {
        Module &m = module();
        std::lock_guard<std::mutex> lock(m.ended_mutex);
        if (!m.has_completer) {
            std::thread(complete_all).detach();
            m.has_completer = true;
        }
        m.ended.push_back(run);
        m.ended_changed.notify_one();
    }

    static void complete_all() {
#ifdef __linux__
        pthread_setname_np(pthread_self(), "pyhvd-graph");
#endif
        Module &m = module();
        for (;;) {
            std::unique_lock<std::mutex> lock(m.ended_mutex);
            m.ended_changed.wait(lock, [&m] { return !m.ended.empty(); });
            std::unique_ptr<Run> run(m.ended.front());
            m.ended.pop_front();
            lock.unlock();
            settle(run.get());
            run->finish();
        }
    }

    /* Bring an ended run's results to its targets, and its error to what finish() reports. */
    static void settle(Run *run) {
        if (run->error_.empty()) take_outputs(run);
        if (run->keep_) {
            Gil gil;
            if (gil) Py_CLEAR(run->keep_);
        }
        if (!run->error_.empty()) {
            keep_error(run->error_);
            if (run->call_) run->error_ += " (the call is at " + run->call_->site + ")";
        }
        module().under_way--;
    }

    static void take_outputs(Run *run) {
        if (run->outputs_.empty()) return; /* they are in the targets */
        for (size_t k = 0; k < run->targets_.size(); k++) {
            const Run::Output &made = run->outputs_[k];
            int64_t expected = run->target_bytes_[k];
            if (expected == Run::UNSIZED) {
                run->targets_[k] = run->allocate(k, made.dims, made.nbytes);
            } else if (expected != made.nbytes) {
                run->error_ = "the result has " + std::to_string(made.nbytes) + " bytes, but the graph expects " +
                              std::to_string(expected) +
                              ": in a compiled graph all ranks must give tensors of equal shapes";
                return;
            }
            if (made.nbytes && !run->targets_[k]) {
                run->error_ = "there is no memory for a result of " + std::to_string(made.nbytes) + " bytes";
                return;
            }
            if (made.nbytes && run->targets_[k] != made.data)
                std::memcpy(run->targets_[k], made.data, (size_t)made.nbytes);
        }
    }

    /* -- its submission -- */

    static Call *find_call(int64_t key) {
        Module &m = module();
        std::lock_guard<std::mutex> lock(m.calls_mutex);
        auto found = m.calls.find(key);
        return found == m.calls.end() ? nullptr : found->second.get();
    }

    /* Submit by the call's id; return whether the run is in flight, or has ended. */
    static bool submit_in_c(Run *run, bool alone) {
        const pyhvd_c_api *api = module().api;
        if (run->has_unsized_ || run->call_->by_python) return false;
        pyhvd_call_id id = run->call_->id_for(run->layout_);
        if (!id) return false;
        run->id_ = id;
        int status = api->submit(id, (uint32_t)run->sources_.size(), run->sources_.data(), run->targets_.data(),
                                 note_end, run, alone ? PYHVD_SUBMIT_WAITS : 0);
        if (status == PYHVD_CALL_SUBMITTED) return true;
        run->id_ = 0;
        if (status == PYHVD_CALL_STALE) run->call_->forget(id);
        return false;
    }

    /* Let the call be submitted by an id from now on, if its operands are like those of this run. */
    static void learn(Run *run, pyhvd_call_id id) {
        const pyhvd_c_api *api = module().api;
        if (run->sources_.size() != run->targets_.size()) return;
        for (size_t k = 0; k < run->sources_.size(); k++) {
            pyhvd_tensor_layout layout = {};
            layout.struct_size = sizeof layout;
            if (api->describe(id, (uint32_t)k, &layout) || layout.n != run->sources_.size()) return;
            if (layout.source_bytes != run->source_bytes_[k] || layout.target_bytes != run->target_bytes_[k])
                return;
        }
        run->call_->learn(id, run->layout_);
    }

    /* Return [(address, dims), ...] of the sources; a new reference, or NULL. */
    static PyObject *describe_sources(const Run *run) {
        PyObject *list = PyList_New((Py_ssize_t)run->sources_.size());
        size_t at = 0;
        for (size_t k = 0; list && k < run->sources_.size(); k++) {
            int64_t rank = run->layout_[at++];
            PyObject *dims = PyTuple_New((Py_ssize_t)rank);
            for (int64_t d = 0; dims && d < rank; d++)
                PyTuple_SET_ITEM(dims, (Py_ssize_t)d, PyLong_FromLongLong(run->layout_[at + d]));
            at += (size_t)rank;
            PyObject *item = dims ? Py_BuildValue("KN", (unsigned long long)(uintptr_t)run->sources_[k], dims)
                                  : nullptr;
            if (!item) {
                Py_CLEAR(list);
                break;
            }
            PyList_SET_ITEM(list, (Py_ssize_t)k, item);
        }
        return list;
    }

    /* Return the addresses of the targets, 0 for an unsized one; a new reference, or NULL. */
    static PyObject *describe_targets(const Run *run) {
        PyObject *list = PyList_New((Py_ssize_t)run->targets_.size());
        for (size_t k = 0; list && k < run->targets_.size(); k++)
            PyList_SET_ITEM(list, (Py_ssize_t)k,
                            PyLong_FromUnsignedLongLong((uintptr_t)run->targets_[k]));
        return list;
    }

    static std::string take_python_error() {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *text = value ? PyObject_Str(value) : nullptr;
        const char *words = text ? PyUnicode_AsUTF8(text) : nullptr;
        std::string found = words ? words : "an error without a text";
        Py_XDECREF(text);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        PyErr_Clear();
        return found;
    }

    /* Call NativeDoor._submit. Return an id with which to try again in C; 0: the run is in flight or has ended. */
    static pyhvd_call_id submit_in_python(Run *run, bool alone, bool may_ask) {
        Gil gil;
        if (!gil) {
            end(run, "the interpreter is ending");
            return 0;
        }
        PyObject *sources = describe_sources(run), *targets = describe_targets(run), *answer = nullptr;
        double help = alone ? (double)module().wait_ns / 1e9 : 0.0;
        PyObject *ask = may_ask && !run->has_unsized_ && !run->call_->by_python ? Py_True : Py_False;
        if (sources && targets)
            answer = PyObject_CallFunction(module().submit, "LKOOdO", (long long)run->key_,
                                           (unsigned long long)(uintptr_t)run, sources, targets, help, ask);
        Py_XDECREF(sources);
        Py_XDECREF(targets);
        pyhvd_call_id id = 0;
        if (!answer) { /* it has not submitted: nobody else knows the run */
            end(run, take_python_error().c_str());
        } else if (PyUnicode_Check(answer)) {
            const char *words = PyUnicode_AsUTF8(answer);
            end(run, words ? words : take_python_error().c_str());
        } else if (PyLong_Check(answer)) {
            id = PyLong_AsUnsignedLongLong(answer);
        }
        Py_XDECREF(answer);
        return id;
    }

    static void submit(Run *run, bool alone) {
        Module &m = module();
        run->call_ = find_call(run->key_);
        if (!run->call_ || !m.api || m.closed || m.process != getpid()) {
            end(run, m.closed ? "the interpreter is ending"
                     : run->call_ && m.api
                         ? "pyhvd was initialised in the parent of this forked process: only the parent can run"
                           " its graphs"
                         : "this graph was traced by another process: trace it anew");
            return;
        }
        if (submit_in_c(run, alone)) return;
        if (pyhvd_call_id id = submit_in_python(run, alone, true)) {
            learn(run, id);
            if (!submit_in_c(run, alone)) submit_in_python(run, alone, false);
        }
    }

    /* Make progress until a run that C code has submitted ends, for a bounded time. */
    static void help(Run *run) {
        const pyhvd_c_api *api = module().api;
        auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(module().wait_ns.load());
        while (!has_ended(run)) {
            auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - std::chrono::steady_clock::now());
            if (left.count() <= 0) return;
            int status = api->wait(run->id_, left.count());
            if (status == PYHVD_CALL_PENDING) continue;
            /* Its `done` may still be running in another thread. */
            for (int turn = 0; turn < 1000 && !has_ended(run); turn++) std::this_thread::yield();
            return;
        }
    }

    /* Read (address, nbytes, dims) of each output; return whether all could be read, else a Python error is set. */
    static bool read_outputs(PyObject *outputs, std::vector<Run::Output> &found) {
        for (Py_ssize_t k = 0; k < PySequence_Size(outputs); k++) {
            PyObject *item = PySequence_GetItem(outputs, k), *dims;
            unsigned long long data;
            long long nbytes;
            bool ok = item && PyArg_ParseTuple(item, "KLO!", &data, &nbytes, &PyTuple_Type, &dims);
            if (ok) {
                Run::Output made = {reinterpret_cast<const void *>((uintptr_t)data), nbytes, {}};
                for (Py_ssize_t d = 0; d < PyTuple_Size(dims); d++)
                    made.dims.push_back(PyLong_AsLongLong(PyTuple_GetItem(dims, d)));
                found.push_back(std::move(made));
            }
            Py_XDECREF(item);
            if (!ok || PyErr_Occurred()) return false;
        }
        return true;
    }

    static bool end_from_python(Run *run, PyObject *error, PyObject *outputs, PyObject *keep) {
        const char *text = error == Py_None ? nullptr : PyUnicode_AsUTF8(error);
        if (error != Py_None && !text) return false;
        if (!read_outputs(outputs, run->outputs_)) return false;
        if (!text && !run->outputs_.empty() && run->outputs_.size() != run->targets_.size()) {
            PyErr_SetString(PyExc_ValueError, "finish() needs as many outputs as the run has results");
            return false;
        }
        Py_INCREF(keep);
        run->keep_ = keep;
        end(run, text);
        return true;
    }

    /* -- all of it -- */

    static Started begin(std::unique_ptr<Run> &held) {
        Run *run = held.get();
        bool alone = module().under_way++ == 0;
        submit(run, alone);
        if (alone && run->id_) help(run);
        if (!has_ended(run)) {
            run->defer();
            held.release();
            int expected = Run::HELPED;
            if (!run->state_.compare_exchange_strong(expected, Run::LEFT, std::memory_order_acq_rel))
                complete(run);
            return Started::later;
        }
        settle(run);
        return Started::ended;
    }
};

/* Begin a run; see the head of this file. */
inline Started start(std::unique_ptr<Run> &held) { return Running::begin(held); }

/* ---- the methods of the extension module, for pyhvd.frameworks.door.NativeDoor ---- */

/* use(capsule, submit): take pyhvd.h's table, and the function that submits in Python. */
inline PyObject *method_use(PyObject *, PyObject *args) {
    PyObject *capsule, *submit;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &submit)) return nullptr;
    void *table = PyCapsule_GetPointer(capsule, PYHVD_C_API_CAPSULE);
    if (!table) return nullptr;
    Module &m = module();
    Py_INCREF(submit);
    m.submit = submit;
    m.process = getpid();
    m.api = static_cast<const pyhvd_c_api *>(table);
    Py_RETURN_NONE;
}

/* wait_for(ns): for how long a handler helps. */
inline PyObject *method_wait_for(PyObject *, PyObject *args) {
    long long ns;
    if (!PyArg_ParseTuple(args, "L", &ns)) return nullptr;
    module().wait_ns = ns;
    Py_RETURN_NONE;
}

/* add(key, site, by_python): know a call. */
inline PyObject *method_add(PyObject *, PyObject *args) {
    long long key;
    const char *site;
    int by_python;
    if (!PyArg_ParseTuple(args, "Lsp", &key, &site, &by_python)) return nullptr;
    auto call = std::make_unique<Call>(site, by_python != 0);
    Module &m = module();
    std::lock_guard<std::mutex> lock(m.calls_mutex);
    m.calls[key] = std::move(call);
    Py_RETURN_NONE;
}

/* finish(run, error, outputs, keep): end a run that Python has submitted. `error` is a text or None; `outputs`
 * are (address, nbytes, dims) of results that are not in the targets, whose memory `keep` owns. */
inline PyObject *method_finish(PyObject *, PyObject *args) {
    unsigned long long run;
    PyObject *error, *outputs, *keep;
    if (!PyArg_ParseTuple(args, "KOOO", &run, &error, &outputs, &keep)) return nullptr;
    if (!Running::end_from_python(reinterpret_cast<Run *>((uintptr_t)run), error, outputs, keep)) return nullptr;
    Py_RETURN_NONE;
}

/* errors(): the texts of the last errors, without call sites. */
inline PyObject *method_errors(PyObject *, PyObject *) {
    Module &m = module();
    std::lock_guard<std::mutex> lock(m.errors_mutex);
    PyObject *list = PyList_New(0);
    for (const std::string &text : m.errors) {
        PyObject *item = PyUnicode_DecodeUTF8(text.data(), (Py_ssize_t)text.size(), "replace");
        if (!list || !item || PyList_Append(list, item)) Py_CLEAR(list);
        Py_XDECREF(item);
        if (!list) break;
    }
    return list;
}

/* Wait without the GIL, for at most some seconds, until a count is 0; return it. */
inline PyObject *await_zero(const std::atomic<int64_t> &count, double seconds) {
    auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    Py_BEGIN_ALLOW_THREADS
    while (count && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(count);
}

/* drain(seconds): wait until no run is under way; return how many are. */
inline PyObject *method_drain(PyObject *, PyObject *args) {
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds)) return nullptr;
    return await_zero(module().under_way, seconds);
}

/* close(seconds): let no thread take the GIL any longer, and wait for those that have. */
inline PyObject *method_close(PyObject *, PyObject *args) {
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds)) return nullptr;
    module().closed = true;
    return await_zero(module().inside, seconds);
}

/* Let free-threaded Python run without the GIL, although it has loaded this module. */
inline PyObject *prepare_module(PyObject *made) {
#ifdef Py_GIL_DISABLED
    if (made) PyUnstable_Module_SetGIL(made, Py_MOD_GIL_NOT_USED);
#endif
    return made;
}

} /* namespace pyhvd_graph */

#define PYHVD_GRAPH_METHODS                                                        \
    {"use", pyhvd_graph::method_use, METH_VARARGS, nullptr},                       \
        {"wait_for", pyhvd_graph::method_wait_for, METH_VARARGS, nullptr},         \
        {"add", pyhvd_graph::method_add, METH_VARARGS, nullptr},                   \
        {"finish", pyhvd_graph::method_finish, METH_VARARGS, nullptr},             \
        {"errors", pyhvd_graph::method_errors, METH_NOARGS, nullptr},              \
        {"drain", pyhvd_graph::method_drain, METH_VARARGS, nullptr},               \
        {"close", pyhvd_graph::method_close, METH_VARARGS, nullptr}

#endif
