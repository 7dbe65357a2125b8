/* Collectives of one node through a shared window: plain C over addresses, no Python, no MPI.
 *
 * Each rank owns one *area* of the window: counters, two small *flat* buffers, a few slots of one chunk
 * each, and a note. An operation is cut into chunks, which all ranks number alike; chunk c uses slot
 * c % slots. If the process set has ranks on other hosts, exchange/exchange.h says how they take part.
 *
 * Counters. They only grow.
 *   packed   chunks that the owner has copied into its slots; a rank that has nothing for the others
 *            leaves chunks out
 *   reduced  chunks for which the owner no longer needs any other rank's slot, or source
 *   flats    flat operations for which the owner has written its part
 *   taken    over several hosts: chunks whose results the owner has copied out
 *
 * Three ways to reduce, of which the first two also serve where each rank gets a portion (scatter.c) and
 * where nothing is reduced (move.c)
 *   1. Flat: at most PYHVD_FLAT bytes. Each rank writes all into its flat buffer, and reduces all
 *      flat buffers.
 *   2. Chunks: each rank packs a chunk, reduces its slice of it, stores the slice with every rank,
 *      and unpacks.
 *   3. Direct: all arrays lie in their owners' *arenas*, which every rank has mapped. The ranks
 *      write into a slot where their arrays are; each reduces its share, and stores it in every
 *      rank's array. `packed` then means that the owner's arrays are ready, `reduced` that the
 *      owner no longer needs the other ranks' arrays.
 *
 * Invariants
 *   1. Data is written before the counter that announces it (release), and read after the counter
 *      (acquire).
 *   2. A slot is overwritten only after every rank that reads it has announced that it is done with
 *      it.
 *   3. A flat buffer is overwritten when its owner begins the next operation but one. By then every
 *      rank has begun the next operation, and so has ended this one: the owner waits for that, as a
 *      rank that only sends waits for nobody else.
 *   4. The chunk size may change between two operations, at the same one on all ranks. The position
 *      of a slot depends on the chunk's number and on `shift` alone, not on the chunk size: so a
 *      rank that is ahead writes into no slot that another still reads.
 *   5. An aborted window is not used again: its counters may disagree, and arrays reduced in place
 *      hold anything.
 *
 * Waiting
 *   1. A rank spins, then yields, then sleeps on `bell`. With `never_yields` it spins longer, and
 *      does not yield: from 6.18 on, Linux lets a thread that yields to a computing one wait for
 *      milliseconds. A thread that sleeps little runs at once when it is woken.
 *   2. A sleeper sets `asleep`, then looks again; an announcer stores its counter, then looks at
 *      `asleep`. Sequentially consistent fences between the two steps of each make one of them see
 *      the other.
 *
 * Aborting
 *   1. A rank that cannot go on writes a note into its own area, once, and then its number into
 *      every rank's `aborted`, unless another rank's number is there. Then it wakes the sleepers.
 *      Any of its threads may do so.
 *   2. `aborted` is stored (release) after the note, and loaded (acquire) before the note is read.
 *      The first number that a rank sees stays.
 *   3. A rank reads `aborted` only before and after a sleep, so it costs nothing otherwise. A chunk
 *      for which all ranks have done their part still ends well; a rank that would sleep returns.
 *   4. A sleeper reads `bell` before `aborted`; an aborter changes `bell` after it. So no sleeper
 *      is missed.
 */
#ifndef PYHVD_WINDOW_H
#define PYHVD_WINDOW_H

#include <stddef.h>
#include <stdint.h>

#include "common/job.h"
#include "common/trace_ring.h"

#define PYHVD_SLOTS 3 /* of a rank, if its set is on one host; else PYHVD_ACROSS_SLOTS */
/* bytes of the note that a rank leaves when it aborts the window, at most */
#define PYHVD_NOTE 8192

typedef struct pyhvd_exchange pyhvd_exchange;

typedef struct {
    int rank, size;
    size_t chunk;         /* bytes of a chunk; at most `capacity` */
    size_t capacity;      /* bytes of a slot */
    size_t shift;         /* offset of the slots from a line, in the current operation */
    uint64_t chunks;      /* chunks of all operations so far, the same on every rank */
    uint64_t flats;       /* flat operations so far, the same on every rank */
    int64_t left_core_ns; /* see pyhvd_leave_shared_core */
    int spin_budget;      /* yields before this rank falls asleep */
    int interruptible;    /* whether pyhvd_window_proceed may return before the end */
    int never_yields;     /* see "Waiting" */
    int slots;            /* of each rank */
    int reads_peers;      /* whether every rank can read every other one's memory; see move.c */
    int32_t pids[PYHVD_MAX_LOCAL]; /* then the ranks' processes */
    pyhvd_exchange *exchange;      /* with other hosts; NULL: all ranks of the set are here */
    pyhvd_trace *trace;            /* NULL: nothing is recorded */
    uint8_t *area[PYHVD_MAX_LOCAL];
    uint8_t *arena[PYHVD_MAX_LOCAL]; /* addresses of the ranks' arenas in this process */
    int64_t arena_bytes;             /* of each of them; 0: there are none */
} pyhvd_window;

/* How far a reduction or a move has come: the chunk step, the stage, and the tensor at which each
 * stage is. */
typedef struct {
    const pyhvd_job *job;
    const pyhvd_local_move *local; /* what this rank copies to itself, on one host all it copies */
    const pyhvd_move *moves;       /* over several hosts: moves, one after the other ... */
    size_t move_count, moved;      /* ... and how many have ended */
    int64_t source, target;        /* addresses, from which the parts count */
    int64_t copied;                /* bytes that this rank has copied to itself */
    /* On one host: ranks that were heard of, and a bit for each rank whose lane comes in chunks. */
    int heard;
    uint64_t in_chunks[PYHVD_MAX_LOCAL / 64];
    /* Of the present move: bytes of a lane in a slice of a chunk, chunks, and how many of them are under
     * way at most. */
    int64_t room, chunks;
    int depth;
    int64_t step;
    int stage;
    int64_t next[4]; /* over several hosts: the next chunk of each stage; see across.c */
    size_t packing, reducing, unpacking;
} pyhvd_job_cursor;

/* Bytes of one rank's area, with `slots` slots of `capacity` bytes. */
size_t pyhvd_window_area(size_t capacity, int slots);

/* Zero this rank's area, touching its pages; before any rank uses the window. */
void pyhvd_window_clear(pyhvd_window *w);

/* Reduce every element in rank order 0 .. size-1; every rank gets the result. */
int pyhvd_window_allreduce(pyhvd_window *w, const pyhvd_job *job);

/* The same in pieces: with w->interruptible set, `proceed` returns PYHVD_LATER after a sleep
 * without news. Any thread may call it again; no other operation may use the window in between. */
void pyhvd_window_begin(pyhvd_job_cursor *cursor, const pyhvd_job *job);
int pyhvd_window_proceed(pyhvd_window *w, pyhvd_job_cursor *cursor);

/* Begin a move from this rank's source to its target; `moves` carry it out over several hosts. */
void pyhvd_window_begin_move(pyhvd_job_cursor *cursor, const pyhvd_local_move *local,
                             const pyhvd_move *moves, size_t move_count, int64_t source,
                             int64_t target);

/* Whether this rank can read 8 bytes of a process, and finds a value there. */
int pyhvd_window_can_read(int32_t pid, uint64_t address, uint64_t value);

/* Gather blocks, one behind the other: every rank gets rank q's counts[q] bytes. */
int pyhvd_window_gather(pyhvd_window *w, const uint8_t *send, uint8_t *recv, const int64_t *counts);

/* Send a block to each rank; blocks lie one behind the other, counts are bytes. */
int pyhvd_window_alltoall(pyhvd_window *w, const uint8_t *send, const int64_t *send_counts,
                          uint8_t *recv, const int64_t *recv_counts);

/* Exchange bytes with a partner. All ranks call it, in pairs. */
int pyhvd_window_exchange(pyhvd_window *w, int partner, const uint8_t *send, int64_t send_count,
                          uint8_t *recv, int64_t recv_count);

/* Move bytes between the ranks of several hosts; the parts count from these addresses. */
int pyhvd_window_move(pyhvd_window *w, const pyhvd_move *move, int64_t source, int64_t target);

/* Return when every rank has called it. */
int pyhvd_window_barrier(pyhvd_window *w);

/* Let no rank wait any longer: their calls return PYHVD_ABORTED, and they can read `note`, the
 * first one of this rank. From any thread, but not from two threads of a rank at a time. */
void pyhvd_window_abort(const pyhvd_window *w, const uint8_t *note, size_t bytes);

/* The note of the rank that aborted the window, and its length; NULL if none has. */
const uint8_t *pyhvd_window_note(const pyhvd_window *w, size_t *bytes);

#endif
