/* Collectives of one node over a shared window: plain C over addresses, no Python, no MPI.
 *
 * Every rank owns one area of the window: a few counters, two small "flat" buffers, and SLOTS slots of
 * one chunk each. An operation is cut into chunks, which all ranks number alike; chunk c uses slot
 * c % SLOTS. A chunk may be smaller than its slot, and its size may change between two operations, at the same
 * one on every rank: where a slot lies follows from the chunk's number alone, so that ranks which are still
 * busy with the operation before share no slot with those that are ahead. The counters only ever grow:
 *
 *   packed   chunks that the owner has laid into its slots
 *   reduced  chunks that the owner needs no slot of any rank for any more, but its own
 *   flat     flat operations for which the owner has laid down its part
 *
 * Memory ordering: data is written before the counter that announces it (release), and read after the
 * counter has been seen (acquire). A slot is written again only when every rank that reads it has announced
 * that it is done with what the slot held; a flat buffer when its owner begins the operation after next, which it
 * can only do once every rank has begun the next one, and so has ended this one.
 *
 * Arrays that lie in their owners' *arenas*, which every rank has mapped, need not be moved: in place of a chunk the
 * ranks lay down where their tensors are, each reduces its share of all elements, and stores the result in every
 * rank's array. `packed` then says that the owner's arrays are ready, `reduced` that it is done with the others'.
 *
 * Waiting: a short spin with yields, then a futex. A sleeper sets `asleep`, then looks again, then
 * sleeps on `bell` as it was before; an announcer stores its counter, then looks for sleepers. The
 * sequentially consistent fences between the two steps of each make sure that one of them sees the other.
 *
 * A rank that cannot go on *aborts* the window, from any of its threads: it writes a note into its own area, once, and
 * then its number into every rank's `aborted`, unless another's is there, and wakes the sleepers. `aborted` is stored
 * with release behind the note, and read with acquire before it: whoever sees a number can read that rank's note, and
 * the first number that a rank sees stays. It is looked at only by who is about to sleep, or has slept, so that waiting costs nothing
 * more: what all ranks have done their part of still ends well, and a rank that comes later does not sleep. The bell is
 * read before `aborted` is, and changed behind it: no sleeper is missed. An aborted window is used no more: its
 * counters need not agree any longer, nor are arrays that were reduced in place of any use.
 */
#ifndef PYHVD_WINDOW_H
#define PYHVD_WINDOW_H

#include <stddef.h>
#include <stdint.h>

#include "common/trace_ring.h"

#define PYHVD_MAX_LOCAL 256 /* ranks on one node */
#define PYHVD_SLOTS 3
#define PYHVD_FLAT 16384 /* bytes of a rank's part in a flat operation */
#define PYHVD_NOTE 8192  /* bytes, at most, that a rank can leave to the others when it aborts the window */

enum { PYHVD_OK = 0, PYHVD_ABORTED = -2, PYHVD_LATER = -3 };

typedef struct {
    int rank, size;
    size_t chunk;     /* bytes of a chunk; at most `capacity` */
    size_t capacity;  /* bytes of a slot */
    size_t shift;     /* where slots begin in a line, in the current operation */
    uint64_t chunks;  /* chunks of all operations so far, the same on every rank */
    uint64_t flats;   /* flat operations so far, the same on every rank */
    int64_t parted;   /* when this rank last left a core to a peer (monotonic ns) */
    int patience;     /* yields before this rank falls asleep */
    int brief;        /* whether a reduction may return before its end; see pyhvd_window_proceed */
    pyhvd_trace *trace; /* where stages are recorded; NULL: nowhere */
    uint8_t *area[PYHVD_MAX_LOCAL];
    uint8_t *arena[PYHVD_MAX_LOCAL]; /* where each rank's own arrays in shared memory are, as this process sees them */
} pyhvd_window;

/* What one rank brings into a reduction: n tensors, one behind the other. */
typedef struct {
    const int64_t *srcs;   /* addresses; 0: this rank has joined, and brings the neutral element */
    const int64_t *dsts;   /* addresses, or 0 for a result that nobody wants; may equal srcs */
    const int64_t *starts; /* n + 1 prefix sums of the element counts */
    size_t n;
    int dtype, op;
    double prescale, postscale;
    int direct; /* whether all ranks reduce in place, without prescale, what lies in their arenas; the same on every rank */
} pyhvd_job;

/* How far a reduction has come: chunk by chunk, three stages each; where each stage is in the job. */
typedef struct {
    const pyhvd_job *job;
    int64_t step;
    int stage;
    size_t packing, reducing, unpacking;
} pyhvd_course;

/* Bytes of one rank's area, whose slots have room for chunks of `capacity` bytes. */
size_t pyhvd_window_area(size_t capacity);

/* Zero this rank's area, touching its pages; before any rank uses the window. */
void pyhvd_window_clear(pyhvd_window *w);

/* Reduce every element in rank order 0 .. size-1, and leave the result with every rank. */
int pyhvd_window_allreduce(pyhvd_window *w, const pyhvd_job *job);

/* The same in pieces: with w->brief set, `proceed` returns PYHVD_LATER after a sleep that brought nothing,
 * and is then called again, by any thread. Nothing else may use the window in between. */
void pyhvd_window_begin(pyhvd_course *course, const pyhvd_job *job);
int pyhvd_window_proceed(pyhvd_window *w, pyhvd_course *course);

/* Gather blocks: rank q's counts[q] bytes come to lie at recv + starts[q], on every rank. */
int pyhvd_window_gather(pyhvd_window *w, const uint8_t *send, uint8_t *recv, const int64_t *counts,
                        const int64_t *starts);

/* Send a block to each rank; starts and counts in bytes. */
int pyhvd_window_alltoall(pyhvd_window *w, const uint8_t *send, const int64_t *send_counts,
                          const int64_t *send_starts, uint8_t *recv, const int64_t *recv_counts,
                          const int64_t *recv_starts);

/* Give the partner some bytes and take as many as it gives. All ranks do so, in pairs. */
int pyhvd_window_exchange(pyhvd_window *w, int partner, const uint8_t *send, int64_t send_count, uint8_t *recv,
                      int64_t recv_count);

/* Return when every rank has called it. */
int pyhvd_window_barrier(pyhvd_window *w);

/* Let no rank wait any longer: their calls return PYHVD_ABORTED, and `note` is there to be read. Of a rank's notes the
 * first counts. Not from two threads of a rank at a time; otherwise from any thread, whatever the others do. */
void pyhvd_window_abort(pyhvd_window *w, const uint8_t *note, size_t bytes);

/* The note of whoever has aborted the window, and its length; NULL if nobody has. */
const uint8_t *pyhvd_window_note(const pyhvd_window *w, size_t *bytes);

#endif
