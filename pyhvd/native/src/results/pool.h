/* Memory of results. Freed buffers are kept for later results of their size: the first writes to fresh
 * pages cost more than the copy of a result.
 *
 * Invariants
 *   1. All functions may be called from any thread. A lock guards what is kept. A thread that takes, gives
 *      or drops a buffer tries to get the lock for some microseconds; then it does without, and allocates or
 *      frees. So a forked child, in which another thread's lock may be taken for ever, can still free its
 *      arrays. No buffer is allocated or freed under the lock: the kernel may need milliseconds.
 *   2. A buffer has a head, which says what it has room for. It is in the list of its size while it is
 *      kept, and in none while it is in use.
 *   3. At most `limit` bytes are kept. If a buffer does not fit, the oldest ones are freed. A buffer is at
 *      most an eighth larger than was asked for; pages that nobody touches need no memory.
 *   4. The end of the last rank of the process sets the limit to 0, so from then on nothing is kept.
 */
#ifndef PYHVD_POOL_H
#define PYHVD_POOL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define PYHVD_POOL_LEAST \
    65536 /* smaller results come from the C library, which keeps their pages */

typedef struct {
    uint64_t kept;         /* bytes */
    uint64_t made, reused; /* buffers that were new, and that were kept before */
} pyhvd_pool_counts;

/* For which memory is kept that nobody uses (ns). */
#define PYHVD_POOL_NS 10000000000

/* Keep at most so many bytes, from now on. */
void pyhvd_pool_limit(uint64_t bytes);

/* Begin, and end, one rank's use; the limit is that of the last rank that has begun. The end of the last
 * one's use frees all that is kept. */
void pyhvd_pool_open(uint64_t bytes);
void pyhvd_pool_close(void);

/* Return memory for `room` bytes, aligned to 64; NULL if there is none. */
void *pyhvd_pool_take(size_t room);

/* Give a buffer back. */
void pyhvd_pool_give(void *memory);

/* The bytes that a buffer has room for. */
size_t pyhvd_pool_room(const void *memory);

/* How many buffers there are, in use or kept. */
extern _Atomic uint32_t pyhvd_pool_buffers;

/* Free what was given back PYHVD_POOL_NS before `now` (CLOCK_MONOTONIC) or earlier. Return when to call
 * again (ns); 0 if there is no buffer. */
int64_t pyhvd_pool_tidy(int64_t now);

pyhvd_pool_counts pyhvd_pool_read(void);

#endif
