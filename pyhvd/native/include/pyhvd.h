/* pyhvd's C interface: submit a remembered call, and learn of its end, without Python and the GIL.
 *
 * A *remembered call* is an allreduce or another collective, of one tensor or grouped, whose name all
 * ranks have submitted before; pyhvd's documentation calls it a cached call. The first submission of a
 * name goes through Python. Then Python gives out a *call id*, and C code submits the call by this id:
 *
 *     Python:  from pyhvd.api import c_api
 *              table = c_api.capsule()            -> PyCapsule_GetPointer(table, PYHVD_C_API_CAPSULE)
 *              number = c_api.call_id("allreduce", array, "grads")      (None: not remembered yet)
 *     C:       const pyhvd_c_api *api = ...;
 *              if (api->submit(number, 1, &source, &target, done, context, 0) ==
 *                  PYHVD_CALL_SUBMITTED) ...      (else: take the GIL, and submit in Python)
 *
 * Link with nothing: the table has all functions. It lives until the process ends.
 *
 * Threads. Every function may be called from any thread, with or without the GIL, unless its comment
 * says otherwise. None takes the GIL, calls Python or raises a Python error.
 *
 * Call ids. An id becomes stale when its call is no longer remembered: the name was submitted with
 * another shape, dtype or operation; its process set was removed; pyhvd was shut down or has failed; or
 * the process was forked. Functions refuse a stale id and touch no memory of its call. No later call gets the
 * same id. Ids need not be given back. Each rank has ids of its own.
 *
 * Growth. Later versions append members to pyhvd_c_api and to pyhvd_tensor_layout, and change no
 * earlier one. PYHVD_C_API_VERSION is 1 for as long as that holds. A program that needs a member of
 * a later release compares `struct_size` with offsetof() of that member.
 */
#ifndef PYHVD_H
#define PYHVD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PYHVD_C_API_VERSION 1
#define PYHVD_C_API_CAPSULE "pyhvd.c_api" /* name of the capsule */
#define PYHVD_MAX_DIMS 32

/* Names a remembered call of this rank; 0 names none. */
typedef uint64_t pyhvd_call_id;

/* Learns that a call has ended. pyhvd calls it exactly once for each submission that returned
 * PYHVD_CALL_SUBMITTED, and never for another one.
 *
 * context  as it was given to submit().
 * error    NULL after a success. Otherwise the text of the Python exception that the call would have
 *          raised, in UTF-8; it is valid until the function returns.
 *          pyhvd.api.c_api.exception(text) returns the exception itself.
 *
 * Thread: any thread of this process that makes progress for the rank, which includes threads that
 * wait in Python or in wait(), or the rank's background thread. The function may be called before
 * submit() has returned. pyhvd holds no mutex meanwhile, but the whole rank makes no progress: the
 * function must return soon. It must not block, wait for another call, take the GIL, or call
 * Python. It may call submit(), also for the same id.
 * Memory: everything that pyhvd wrote into the targets happens before the function is called, and
 * everything that the submitter wrote before submit() is visible to it. pyhvd no longer uses sources and
 * targets. After an error the contents of the targets are undefined. */
typedef void (*pyhvd_done)(void *context, const char *error);

/* What submit() returns. */
enum {
    /* The call is in flight; `done` will be called, or was called already. */
    PYHVD_CALL_SUBMITTED = 0,
    /* Not now: submit this call in Python. Nothing was submitted, and `done` is not called. The call is in
     * flight already (Python will raise an error), this rank has joined, calls of other names go
     * by message at this moment, an address does not suit (see pyhvd_tensor_layout), or pyhvd is
     * ending. The next submission by this id may succeed. */
    PYHVD_CALL_BY_PYTHON = 1,
    /* The id is stale: submit in Python, and ask Python for a new id. Likewise of wait() and
     * describe(). */
    PYHVD_CALL_STALE = 2,
    /* An argument is wrong: another number of tensors, a missing `done`, or unknown flags. */
    PYHVD_CALL_INVALID = 3,
};

/* What wait() returns, beside PYHVD_CALL_STALE. */
enum {
    PYHVD_CALL_ENDED = 0,    /* the call is not in flight */
    PYHVD_CALL_PENDING = 4,  /* the time is over, and the call is in flight */
    PYHVD_CALL_NOT_HERE = 5, /* this thread must not wait: it ends calls */
};

/* Flags of submit(). */
enum {
    /* The caller calls wait() at once. Without this flag another thread is woken to send the
     * call. */
    PYHVD_SUBMIT_WAITS = 1,
};

/* A tensor's type of element. */
enum {
    PYHVD_TYPE_UINT8 = 0,
    PYHVD_TYPE_INT8 = 1,
    PYHVD_TYPE_UINT16 = 2,
    PYHVD_TYPE_INT16 = 3,
    PYHVD_TYPE_INT32 = 4,
    PYHVD_TYPE_INT64 = 5,
    PYHVD_TYPE_FLOAT16 = 6,
    PYHVD_TYPE_FLOAT32 = 7,
    PYHVD_TYPE_FLOAT64 = 8,
    PYHVD_TYPE_BOOL = 9,
    PYHVD_TYPE_BFLOAT16 = 10,
    PYHVD_TYPE_UINT32 = 11,
    PYHVD_TYPE_UINT64 = 12,
    PYHVD_TYPE_COMPLEX64 = 13,
    PYHVD_TYPE_COMPLEX128 = 14,
};

/* One tensor of a remembered call. Memory is row-major, without gaps. The caller ensures that its memory
 * has this layout: submit() sees addresses only. */
typedef struct pyhvd_tensor_layout {
    size_t struct_size; /* set by the caller: sizeof(pyhvd_tensor_layout) */
    uint32_t n;         /* tensors of the call */
    int32_t type;       /* PYHVD_TYPE_..., or -1 for a barrier, which has no memory */
    int32_t ndim;
    int32_t in_arena;             /* whether source and target must be memory from pyhvd.empty() */
    int64_t dims[PYHVD_MAX_DIMS]; /* of the source: `ndim` lengths */
    int64_t source_bytes;
    int64_t target_bytes; /* differs from `source_bytes` where a verb changes the number of rows */
} pyhvd_tensor_layout;

typedef struct pyhvd_c_api {
    uint32_t version;   /* PYHVD_C_API_VERSION */
    size_t struct_size; /* of the table in the running pyhvd */

    /* Return a number that changes when ids become stale together: pyhvd was initialized or shut down
     * on a rank of this process, it has failed, or the process was forked. An id that Python gave
     * out under another generation is stale. An id can also become stale alone. */
    uint64_t (*generation)(void);

    /* Describe the k-th tensor, in the order of the Python call; `layout->struct_size` must be set.
     * Return 0, PYHVD_CALL_STALE, or PYHVD_CALL_INVALID if there is no such tensor. */
    int (*describe)(pyhvd_call_id id, uint32_t k, pyhvd_tensor_layout *layout);

    /* Submit the call with n tensors, in the order of the Python call. Never blocks for other ranks.
     *
     * sources, targets  n addresses each; the arrays themselves are read before the return. A target may be
     *                   its source: the call is then in place. Other overlaps are errors that are not found.
     *                   The memory must stay valid, and unchanged by others, until `done` is called.
     * done, context     see pyhvd_done; `done` must not be NULL.
     * flags             0 or PYHVD_SUBMIT_WAITS.
     *
     * The order of submissions may differ between ranks. Return PYHVD_CALL_SUBMITTED,
     * PYHVD_CALL_BY_PYTHON, PYHVD_CALL_STALE or PYHVD_CALL_INVALID. */
    int (*submit)(pyhvd_call_id id, uint32_t n, const void *const *sources, void *const *targets,
                  pyhvd_done done, void *context, uint32_t flags);

    /* Wait for at most `ns` nanoseconds until the last submission of this call has ended, whoever
     * submitted it. Meanwhile make progress for the rank, so that a result comes as early as in
     * Python. With ns <= 0 only look.
     *
     * Return PYHVD_CALL_ENDED, and then the targets are complete, if there was no error; `done` may still be
     * running in another thread. Or return PYHVD_CALL_PENDING, or PYHVD_CALL_STALE: a submission of an
     * id that became stale ends nevertheless, and `done` is called. Return PYHVD_CALL_NOT_HERE at
     * once in a `done` function and on pyhvd's background threads.
     * A bounded wait cannot deadlock. Python signal handlers do not run meanwhile. */
    int (*wait)(pyhvd_call_id id, int64_t ns);
} pyhvd_c_api;

#ifdef __cplusplus
}
#endif

#endif
