/* Memory of results. Freed buffers are kept for later results of their size: the first writes to fresh
 * pages cost more than the copy of a result.
 *
 * Invariants
 *   1. All functions may be called from any thread. A lock guards what is kept; who takes, gives or drops
 *      a buffer, and cannot take the lock at once, does without: it allocates, or frees. So a forked child,
 *      in which another thread's lock may be taken for ever, can still free its arrays.
 *   2. A buffer has a head, which says what it has room for. It is in the list of its size while it is
 *      kept, and in none while it is in use.
 *   3. At most `limit` bytes are kept. If a buffer does not fit, the oldest ones are freed.
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

/* Keep at most so many bytes, from now on. */
void pyhvd_pool_limit(uint64_t bytes);

/* Return memory for `bytes` bytes, aligned to 64; NULL if there is none. */
void *pyhvd_pool_take(size_t bytes);

/* Give a buffer back. */
void pyhvd_pool_give(void *memory);

/* The bytes that a buffer has room for. */
size_t pyhvd_pool_room(const void *memory);

/* How many buffers are kept; written under the lock. */
extern _Atomic uint32_t pyhvd_pool_buffers;

/* Free what was given back before `since` (ns of CLOCK_MONOTONIC). Return when the oldest buffer that is
 * still kept was given back; 0 if none is. */
int64_t pyhvd_pool_drop(int64_t since);

pyhvd_pool_counts pyhvd_pool_read(void);

#endif
