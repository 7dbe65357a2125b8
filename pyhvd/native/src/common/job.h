/* The types that the window, the exchange between hosts and the agreement share: limits, what their
 * functions return, and one rank's part of a reduction.
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
} pyhvd_job;

#endif
