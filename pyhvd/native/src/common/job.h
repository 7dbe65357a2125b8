/* The types that the window, the exchange between hosts and the agreement share: limits, what their
 * functions return, and one rank's part of a collective.
 */
#ifndef PYHVD_JOB_H
#define PYHVD_JOB_H

#include <stddef.h>
#include <stdint.h>

#define PYHVD_MAX_LOCAL 256 /* ranks on one host */
#define PYHVD_MAX_HOSTS 64
#define PYHVD_ACROSS_SLOTS 4 /* of a rank, if the set has ranks on several hosts */
#define PYHVD_FLAT 16384     /* bytes of a flat operation, at most */

enum { PYHVD_OK = 0, PYHVD_ABORTED = -2, PYHVD_LATER = -3, PYHVD_LOST = -4 };

/* Which part of a tensor each rank of the set gets. */
typedef struct {
    const int64_t *starts; /* by set rank, where its portion begins, and the end (elements) */
    int64_t own;           /* this set rank */
    int64_t longest;       /* elements of the longest portion */
    /* Over several hosts, by host and slice: the set rank whose portion goes to the host with the slice;
     * -1: none. A rank's portion goes with the first slice that it owns. NULL on one host. */
    const int64_t *by_slice;
} pyhvd_portions;

/* One rank's part of a reduction: n tensors, treated as one sequence of elements. */
typedef struct {
    /* addresses; 0: this rank has joined, and contributes the neutral element */
    const int64_t *srcs;
    const int64_t *dsts;   /* addresses; 0: the result is dropped; may equal srcs */
    const int64_t *starts; /* n + 1 prefix sums of the element counts */
    size_t n;
    int dtype, op;
    double prescale, postscale;
    /* whether every rank's tensors and results lie in its arena, without prescale; the same on all ranks */
    int direct;
    /* Of one tensor: a rank gets its portion alone, at dsts[0]. NULL: every rank gets the whole result. */
    const pyhvd_portions *portions;
} pyhvd_job;

/* Bytes of this rank's memory that go into a lane of a move, or come out of it. */
typedef struct {
    int64_t lane, offset, bytes, address;
} pyhvd_part;

/* One rank's part of a move in which each rank has a lane: it copies its sources into its own lane, and
 * its targets out of the other ranks' lanes. The parts are sorted by lane and offset, and none is empty.
 * Their addresses count from the beginning of the source, or of the target. The ranks of one host move
 * so through their window, and those of several hosts if a payload has room for all lanes. */
typedef struct {
    const pyhvd_part *sources, *targets;
    size_t source_count, target_count;
    int64_t own_from, own_to, own_bytes; /* what the rank copies from its source to its target */
    const int64_t *origins; /* where each target begins in the source of its lane's owner */
    /* Bytes of the longest lane, and of all; the same on all ranks, and 0 if nothing moves. */
    int64_t longest, total;
    /* Over several hosts: where each lane begins if they lie in the order of the hosts that agree. */
    const int64_t *starts;
} pyhvd_local_move;

/* One rank's part of a move over several hosts; move_across.c explains it. */
typedef struct {
    /* Sorted by lane and offset; none is empty, and the sources of all local ranks do not overlap. */
    const pyhvd_part *sources, *targets;
    size_t source_count, target_count;
    const int64_t *lane_bytes; /* of each lane */
    int lanes;
    /* By host: the lane whose bytes go there, and the lane whose bytes come from there; -1: none.
     * For the own host, `out` is the lane from which local ranks copy each other's bytes. */
    const int64_t *out, *in;
    int single; /* whether each byte that comes has one target among the local ranks */
    int relays; /* whether its sources are in the target: bytes that an earlier move has brought */
    int direct; /* whether every host has one rank: each part is a whole lane */
    int owned;  /* slices of one rank, at most, on any host */
    /* bytes of the longest lane; `lanes`, `direct`, `owned`, `longest` are equal on all hosts' ranks */
    int64_t longest;
} pyhvd_move;

#endif
