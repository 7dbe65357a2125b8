/* The exchange of a reduction between hosts: this rank's slices of each chunk, over its links.
 *
 * The ranks of a process set are on `hosts` hosts. A chunk has `slices` slices, as many as the host
 * with the most ranks has. On each host slice k belongs to one rank (pyhvd_first_slice), and the
 * owners of a slice are linked: the link is the slice's *rail*. The ranks of a host first reduce a
 * chunk among themselves. Then an owner has its host's partial result of its slice, and the owners
 * reduce the partial results in the order of the hosts. So every carrier, and every way below, adds
 * the ranks of host 0 in their order, then adds to it the sum of the ranks of host 1, and so on. A
 * partial result has the type of the tensor: float16 and bfloat16 are rounded once per host, and
 * once at the end.
 *
 * Two ways
 *   1. Whole: each owner sends its partial result to all others, and each reduces all. One step.
 *   2. Direct: the slice is cut into one part per host. Each owner sends part g to host g, reduces
 *      its own part, and sends the result to all. Two steps, and 2 (H-1)/H of the bytes.
 *
 * Invariants
 *   1. All ranks of all hosts number the chunks alike, and compute the same sizes. A frame's tag
 *      says which chunk and which kind; a frame with another length than computed is an error.
 *   2. Chunk c begins only when chunk c - PYHVD_DEPTH has ended on this rank. So the memory of chunk c
 *      is free: its boxes (contributions of other hosts) belonged to c - PYHVD_DEPTH.
 *   3. A frame of a chunk that has not begun here is not accepted: its link stands still. This
 *      blocks nothing that the chunks before it need. For its sender has ended its chunk
 *      c - PYHVD_DEPTH, so it has posted all frames of that chunk before, and frames keep their
 *      order.
 *   4. A result arrives where the own contribution was. It comes after its sender has received all
 *      of this contribution. It is accepted when the own link has sent them too: MPI may say so
 *      later.
 *   5. A chunk has ended when all results have arrived and all own frames have been sent.
 *   6. A rank posts its contributions to chunk c when it has begun c and its chunk c - depth has
 *      ended; each rank chooses its own depth, 2 to PYHVD_DEPTH. This blocks nothing: all ranks post
 *      their contributions to the first chunk that has not ended everywhere.
 *
 * Depth
 *   What is in flight beyond what the link holds waits in the network's queues, and the agreement's
 *   small messages wait behind it. So the depth follows the rate at which the chunks of large
 *   reductions have lately ended on this rank: chunks for 4 ms, and for 512 KiB at least.
 *
 * A chunk can also be moved (move_across.c): nothing is reduced, each frame has its own memory at both
 * ends, and hosts may send each other different numbers of bytes. The invariants hold too.
 */
#ifndef PYHVD_EXCHANGE_H
#define PYHVD_EXCHANGE_H

#include <poll.h>

#include "common/counters.h"
#include "common/futex.h"
#include "common/job.h"
#include "links/link.h"

#define PYHVD_DEPTH PYHVD_ACROSS_SLOTS /* chunks under way between hosts, at most */
/* Bytes of all slices, over all other hosts, up to which a slice is sent whole; with two hosts, of one
 * slice. A prototype was as fast with either way at 256 KiB on two hosts, and faster in two steps above
 * it. */
#define PYHVD_WHOLE 262144

/* A slice of a chunk that is, or was, under way. */
typedef struct {
    uint64_t tag; /* of its contributions; results have the next tag */
    uint8_t *in;  /* this host's partial result */
    uint8_t *out; /* the result; may equal `in` */
    int64_t count;
    int whole, reduced; /* whether it goes whole; whether this rank has done its sums */
    uint32_t contributions, results; /* that are still to come */
    uint32_t unsent;                 /* own frames that are not sent */
} pyhvd_slice;

/* The bytes of a frame of a moved slice: where they come from, or go to. */
typedef struct {
    uint8_t *at;
    size_t bytes; /* 0: there is no frame */
} pyhvd_place;

typedef struct pyhvd_exchange pyhvd_exchange;
struct pyhvd_exchange {
    int host, hosts;
    int slices;                        /* of a chunk */
    int first, owned;                  /* this rank owns slices first to first + owned - 1 */
    int lost;                          /* 1 + the host whose link has failed; or 0 */
    int error;                         /* that link's error */
    const _Atomic uint32_t *lost_host; /* not 0 if a host is known to be lost; may be NULL */
    uint64_t posted;                   /* contributions to all chunks before this one are posted */
    int depth;                         /* chunks whose contributions are posted, at most */
    double rate;                       /* bytes per ns: the estimate of the link's rate */
    int64_t timed_ns;                  /* when the timed part of an operation began */
    pyhvd_link *links;                 /* [owned][hosts]; the own host's are not used */
    const pyhvd_mpi *mpi;              /* the carrier of all links; NULL: TCP */
    pyhvd_slice *under_way;            /* [PYHVD_DEPTH][owned] */
    pyhvd_place *places;               /* of frames to come: [PYHVD_DEPTH][owned][hosts] */
    uint8_t *boxes;        /* contributions that arrive: [PYHVD_DEPTH][owned][hosts][box] */
    size_t box;            /* bytes */
    pyhvd_slice flat;      /* one on all rails: all rails carry the same bytes */
    uint8_t *flat_partial; /* PYHVD_FLAT bytes */
    /* By local rank, a descriptor (eventfd or pipe): a write wakes the rank if it polls. */
    int bells[PYHVD_MAX_LOCAL];
    struct pollfd *polls; /* scratch memory of a sleep */
    /* What is counted of host g: counters[numbers[g]], by the one thread that uses the exchange. */
    pyhvd_rail_counters *counters;
    uint32_t numbers[PYHVD_MAX_HOSTS];
    pyhvd_rail_counters *own_counters; /* memory for them, unless the user has set others */
    int last;                          /* the host whose frame arrived last */
    int waited;         /* whether the present operation has waited for other hosts */
    int64_t idle_since; /* ns; since when it waits, after some yields; 0: it does not */
    int64_t slept;      /* ns of such waits, since a frame last arrived */
    /* The stretch that the trace will record, if `trace_begin` (ns) is not 0; and the bytes sent and
     * received before it. */
    int64_t trace_begin;
    uint64_t trace_bytes;
    uint32_t trace_kind; /* PYHVD_EXCHANGING, or PYHVD_AWAITING: for a local rank */
};

/* The first slice that belongs to a local rank, or to a later one: local rank k * ranks / slices owns
 * slice k. */
static inline int pyhvd_first_slice(const pyhvd_exchange *e, int rank, int ranks) {
    return (int)(((int64_t)rank * e->slices + ranks - 1) / ranks);
}

/* Allocate the memory for slots of `capacity` bytes; return 0 without memory. */
int pyhvd_exchange_init(pyhvd_exchange *e, size_t capacity);
void pyhvd_exchange_free(pyhvd_exchange *e);

/* Begin an owned slice (0 .. owned-1) of a chunk with the job's type and op; `progress` posts it. */
void pyhvd_exchange_begin(const pyhvd_exchange *e, const pyhvd_job *job, uint64_t chunk, int own,
                          uint8_t *in, uint8_t *out, int64_t count);

/* Begin an owned slice of a chunk that is moved: send out[g] to host g, and receive in[g] from it. */
void pyhvd_exchange_begin_move(const pyhvd_exchange *e, uint64_t chunk, int own,
                               const pyhvd_place *out, const pyhvd_place *in);

/* Where host g's contribution to an owned slice of a chunk that is under way may lie: a box. */
uint8_t *pyhvd_exchange_box(const pyhvd_exchange *e, uint64_t chunk, int own, int host);

/* Begin a flat operation: `flat_partial` has `bytes` bytes of this host. */
void pyhvd_exchange_begin_flat(pyhvd_exchange *e, uint64_t number, size_t bytes);

/* Store the addresses of all hosts' parts of a flat operation, in the order of the hosts. */
void pyhvd_exchange_flat_parts(const pyhvd_exchange *e, int64_t *parts);

/* Post and move what can be, and reduce what has arrived of the chunks [from, to), which are under
 * way. Return whether anything was done, or PYHVD_LOST. */
int pyhvd_exchange_progress(pyhvd_exchange *e, const pyhvd_job *job, uint64_t from, uint64_t to);

/* Over MPI: look whether a peer is lost. */
void pyhvd_exchange_look(const pyhvd_exchange *e);

/* Whether frames are still to come, or to be sent. */
int pyhvd_exchange_waits(const pyhvd_exchange *e);

/* Bytes that this rank has sent and received. */
uint64_t pyhvd_exchange_bytes(const pyhvd_exchange *e);

/* Count the time of a wait, which has ended. */
static inline void pyhvd_exchange_end_wait(pyhvd_exchange *e) {
    if (e->idle_since) e->slept += pyhvd_now() - e->idle_since;
    e->idle_since = 0;
}

/* Count an operation that has ended. */
void pyhvd_exchange_count(pyhvd_exchange *e);

/* Take note that the first `ended` of a reduction's `count` chunks have ended on this rank; after the last
 * one of a large reduction, estimate the link's rate, and choose the depth for the next ones. */
void pyhvd_exchange_time(pyhvd_exchange *e, int64_t ended, int64_t count, size_t chunk);

/* The depth for chunks that carry so many bytes over this host's links, at the estimated rate. */
int pyhvd_exchange_depth(const pyhvd_exchange *e, size_t chunk);

/* Whether a chunk, or the flat operation, has ended on this rank. */
int pyhvd_exchange_has_ended(const pyhvd_exchange *e, uint64_t chunk);
int pyhvd_exchange_flat_ended(const pyhvd_exchange *e);

#endif
