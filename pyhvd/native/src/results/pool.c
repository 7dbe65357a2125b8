/* The pool of results; pool.h states the invariants. */
#include "results/pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/futex.h"

#define ALIGNED 64
#define STEPS 8 /* sizes between two powers of two: at most an eighth of a buffer is not used */
#define SIZES (64 * STEPS)
#define LARGE ((size_t)4 << 20) /* from here on huge pages are worth it, as numpy finds too */

typedef struct head head;
struct head {
    size_t room;
    head *newer, *older; /* in the list of its size */
    int64_t given_ns;
    uint32_t size;
};

_Static_assert(sizeof(head) <= ALIGNED, "a buffer begins behind its head");

static struct {
    pthread_mutex_t lock;
    head *newest[SIZES], *oldest[SIZES];
    uint64_t limit;
    pyhvd_pool_counts counts;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

_Atomic uint32_t pyhvd_pool_buffers;

/* Round up to a size of the pool; store its number. */
static size_t round_up(size_t bytes, uint32_t *size) {
    if (bytes < 4096) bytes = 4096;
    int power = 63 - __builtin_clzll(bytes);
    size_t step = ((size_t)1 << power) / STEPS, room = (bytes + step - 1) / step * step;
    power = 63 - __builtin_clzll(room);
    *size = (uint32_t)(power * STEPS) + (uint32_t)((room >> (power - 3)) % STEPS);
    return room;
}

static void unlink_kept(head *h) {
    *(h->newer ? &h->newer->older : &pool.newest[h->size]) = h->older;
    *(h->older ? &h->older->newer : &pool.oldest[h->size]) = h->newer;
    pool.counts.kept -= h->room;
    atomic_fetch_sub_explicit(&pyhvd_pool_buffers, 1, memory_order_relaxed);
}

static head *find_oldest(void) {
    head *found = NULL;
    for (int k = 0; k < SIZES; k++)
        if (pool.oldest[k] && (!found || pool.oldest[k]->given_ns < found->given_ns))
            found = pool.oldest[k];
    return found;
}

/* Free the oldest buffers until so many bytes at most are kept. */
static void shrink(uint64_t bytes) {
    while (pool.counts.kept > bytes) {
        head *h = find_oldest();
        unlink_kept(h);
        free(h);
    }
}

static head *make(size_t room, uint32_t size) {
    head *h = aligned_alloc(ALIGNED, ALIGNED + room);
    if (!h) return NULL;
    h->room = room;
    h->size = size;
#ifdef MADV_HUGEPAGE
    if (room >= LARGE) {
        uintptr_t first = ((uintptr_t)h + 4095) & ~(uintptr_t)4095;
        madvise((void *)first, ((uintptr_t)h + room - first) & ~(uintptr_t)4095, MADV_HUGEPAGE);
    }
#endif
    return h;
}

static head *head_of(const void *memory) { return (head *)((uintptr_t)memory - ALIGNED); }

void pyhvd_pool_limit(uint64_t bytes) {
    pthread_mutex_lock(&pool.lock);
    pool.limit = bytes;
    shrink(bytes);
    pthread_mutex_unlock(&pool.lock);
}

void *pyhvd_pool_take(size_t bytes) {
    uint32_t size;
    size_t room = round_up(bytes, &size);
    head *h = NULL;
    if (!pthread_mutex_trylock(&pool.lock)) {
        h = pool.newest[size];
        if (h) unlink_kept(h);
        if (h)
            pool.counts.reused++;
        else
            pool.counts.made++;
        pthread_mutex_unlock(&pool.lock);
    }
    if (!h) h = make(room, size);
    return h ? (uint8_t *)h + ALIGNED : NULL;
}

// cppcheck-suppress constParameterPointer - it is freed, or kept for another result
void pyhvd_pool_give(void *memory) {
    if (!memory) return;
    head *h = head_of(memory);
    int64_t now = pyhvd_now();
    if (pthread_mutex_trylock(&pool.lock)) {
        free(h);
        return;
    }
    if (h->room > pool.limit) {
        free(h);
    } else {
        shrink(pool.limit - h->room);
        h->given_ns = now;
        h->newer = NULL;
        h->older = pool.newest[h->size];
        *(h->older ? &h->older->newer : &pool.oldest[h->size]) = h;
        pool.newest[h->size] = h;
        pool.counts.kept += h->room;
        atomic_fetch_add_explicit(&pyhvd_pool_buffers, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&pool.lock);
}

size_t pyhvd_pool_room(const void *memory) { return head_of(memory)->room; }

int64_t pyhvd_pool_drop(int64_t since) {
    head *h = NULL;
    int64_t given = 0;
    if (pthread_mutex_trylock(&pool.lock)) return since + 1000000000; /* look again in a second */
    while ((h = find_oldest()) && h->given_ns < since) {
        unlink_kept(h);
        free(h);
    }
    if (h) given = h->given_ns;
    pthread_mutex_unlock(&pool.lock);
    return given;
}

pyhvd_pool_counts pyhvd_pool_read(void) {
    pthread_mutex_lock(&pool.lock);
    pyhvd_pool_counts counts = pool.counts;
    pthread_mutex_unlock(&pool.lock);
    return counts;
}
