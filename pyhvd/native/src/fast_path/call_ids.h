/* The call ids of pyhvd.h: C code outside of pyhvd submits remembered calls by them.
 *
 * The process has one table of ids. An entry is used by C threads without the GIL while Python may be about to
 * free the call. Rules:
 *
 *   1. An id is the entry's index (low 32 bits) and its serial (high 32 bits). An entry's `state` is
 *      the current serial, and the number of threads that use the entry (low 32 bits). A thread
 *      enters by a compare-and-swap that checks the serial and counts the thread.
 *   2. `detach` increments the serial: no further thread enters. Python then keeps the call, and with it
 *      the path, until `release` finds the entry unused. Entries are reused, and never freed.
 *   3. Detaching does not end a submission. A call in flight ends as any other, and tells its submitter.
 *   4. A forked child has the entries, but not the threads: it refuses all ids of its parent, before
 *      it looks at a path. Its users' counts may stay above 0, and these entries are not reused.
 *
 * A submission is a call's turn as any other (progress.h), with an `ending`. It is held first, and looks at
 * `has_messages` afterwards. The queue sets that word before it looks for calls in flight, or
 * before it flushes the held calls. Both looks are under the submissions' mutex. So of two
 * submissions of one name at least one sees the other. Python's submissions do the same with the
 * queue's dictionaries, which tell names apart: here any message turns a submission away.
 */
#ifndef PYHVD_CALL_IDS_H
#define PYHVD_CALL_IDS_H

#include "../include/pyhvd.h"
#include "fast_path/progress.h"

/* A tensor of a call that has an id, in the user's order. */
typedef struct {
    uint32_t index;  /* among the call's slots */
    int may_be_held; /* whether it could lie in the arena: it has no prescale factor */
    pyhvd_tensor_layout layout;
} pyhvd_id_tensor;

/* What the table knows of a call; read-only from `attach` to `release`. */
typedef struct {
    pyhvd_fast_path *path;
    pyhvd_call *call;
    pyhvd_id_tensor *tensors;     /* by malloc; as many as the call has slots */
    int64_t arena_from, arena_to; /* of this rank; equal if there is no arena */
} pyhvd_id_facts;

extern const pyhvd_c_api pyhvd_c_functions;

/* Give a call an id, and take over `tensors`; return 0 if the table is full or without memory. */
pyhvd_call_id pyhvd_call_id_attach(const pyhvd_id_facts *facts);

/* Make an id stale. */
void pyhvd_call_id_detach(pyhvd_call_id id);

/* Return whether no thread uses the call of a stale id any longer; once, when it returns 1. */
int pyhvd_call_id_release(pyhvd_call_id id);

/* Count a generation: ids may have become stale together. */
void pyhvd_call_id_next_generation(void);

#endif
