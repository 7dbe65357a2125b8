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

/* One rank's part of a reduction: n tensors, treated as one sequence of elements. */
typedef struct {
    /* addresses; 0: this rank has joined, and contributes the neutral element */
    const int64_t *srcs;
    const int64_t *dsts;   /* addresses; 0: the result is dropped; may equal srcs */
    const int64_t *starts; /* n + 1 prefix sums of the element counts */
    size_t n;
    int dtype, op;
    double prescale, postscale;
    /* whether every rank reduces in place, in its arena, without prescale; the same on all ranks */
    int direct;
    /* Where each rank's portion of one tensor begins, and the end (elements): a rank gets its portion
     * alone, at dsts[0]. NULL: every rank gets the whole result. On one host only. */
    const int64_t *portions;
} pyhvd_job;

/* Bytes of this rank's memory that go into a lane of a move, or come out of it. */
typedef struct {
    int64_t lane, offset, bytes, address;
} pyhvd_part;

/* One rank's part of a move among the ranks of one host. Each rank has a lane: it copies its sources
 * into its own lane, and its targets out of the other ranks' lanes. The parts are sorted by lane and
 * offset, and none is empty. Their addresses count from the beginning of the source, or of the target. */
typedef struct {
    const pyhvd_part *sources, *targets;
    size_t source_count, target_count;
    int64_t own_from, own_to, own_bytes; /* what the rank copies from its source to its target */
    int64_t longest; /* bytes of the longest lane; the same on all ranks, and 0 if nothing moves */
} pyhvd_local_move;

#endif
