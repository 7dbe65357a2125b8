/* The pool of results; pool.h states the invariants. */
#include "results/pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include "common/futex.h"

#define ALIGNED 64
#define SMALLEST ((size_t)32 << 10) /* from here on all sizes are whole pages */
#define STEPS 8 /* sizes between two powers of two: at most an eighth of a buffer is not used */
#define SIZES (64 * STEPS)
#define TRIES 200               /* for the lock, which is held for less than a microsecond */
#define LARGE ((size_t)4 << 20) /* from here on huge pages are worth it, as numpy finds too */

typedef struct head head;
struct head {
    size_t bytes;        /* of the buffer, with its head */
    head *newer, *older; /* in the list of its size */
    int64_t given_ns;
    uint32_t size;
};

_Static_assert(sizeof(head) <= ALIGNED, "a buffer begins behind its head");

static struct {
    pthread_mutex_t lock;
    head *newest[SIZES], *oldest[SIZES];
    uint64_t limit;
    int ranks; /* that use the pool */
    pyhvd_pool_counts counts;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

_Atomic uint32_t pyhvd_pool_buffers;

/* Return the bytes of a buffer with so much room; store the number of its size. */
static size_t round_up(size_t room, uint32_t *size) {
    size_t bytes = room + ALIGNED < SMALLEST ? SMALLEST : room + ALIGNED;
    int power = 63 - __builtin_clzll(bytes);
    size_t step = ((size_t)1 << power) / STEPS;
    bytes = (bytes + step - 1) / step * step;
    power = 63 - __builtin_clzll(bytes);
    *size = (uint32_t)(power * STEPS) + (uint32_t)((bytes >> (power - 3)) % STEPS);
    return bytes;
}

static void unlink_kept(head *h) {
    *(h->newer ? &h->newer->older : &pool.newest[h->size]) = h->older;
    *(h->older ? &h->older->newer : &pool.oldest[h->size]) = h->newer;
    pool.counts.kept -= h->bytes;
}

static head *find_oldest(void) {
    head *found = NULL;
    for (int k = 0; k < SIZES; k++)
        if (pool.oldest[k] && (!found || pool.oldest[k]->given_ns < found->given_ns))
            found = pool.oldest[k];
    return found;
}

/* Take the lock, or give up. */
static int try_lock(void) {
    for (int k = 0; k < TRIES; k++) {
        if (!pthread_mutex_trylock(&pool.lock)) return 1;
        pyhvd_pause();
    }
    return 0;
}

/* Unlink the oldest buffers until so many bytes at most are kept; return them, for free_all(). */
static head *shrink(uint64_t bytes) {
    head *all = NULL;
    while (pool.counts.kept > bytes) {
        head *h = find_oldest();
        unlink_kept(h);
        h->older = all;
        all = h;
    }
    return all;
}

static void free_all(head *h) {
    while (h) {
        head *next = h->older;
        munmap(h, h->bytes);
        atomic_fetch_sub_explicit(&pyhvd_pool_buffers, 1, memory_order_relaxed);
        h = next;
    }
}

/* The C library would keep freed memory that lies between other memory. */
static head *make(size_t bytes, uint32_t size) {
    head *h = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (h == MAP_FAILED) return NULL;
    atomic_fetch_add_explicit(&pyhvd_pool_buffers, 1, memory_order_relaxed);
#ifdef MADV_HUGEPAGE
    if (bytes >= LARGE) madvise(h, bytes, MADV_HUGEPAGE);
#endif
    h->bytes = bytes;
    h->size = size;
    return h;
}

static head *head_of(const void *memory) { return (head *)((uintptr_t)memory - ALIGNED); }

/* Set the limit and the number of ranks, under the lock; release it. */
static void settle(uint64_t limit, int ranks) {
    pool.limit = limit;
    pool.ranks = ranks;
    head *freed = shrink(limit);
    pthread_mutex_unlock(&pool.lock);
    free_all(freed);
}

void pyhvd_pool_limit(uint64_t bytes) {
    pthread_mutex_lock(&pool.lock);
    settle(bytes, pool.ranks);
}

void pyhvd_pool_open(uint64_t bytes) {
    pthread_mutex_lock(&pool.lock);
    settle(bytes, pool.ranks + 1);
}

void pyhvd_pool_close(void) {
    pthread_mutex_lock(&pool.lock);
    settle(pool.ranks > 1 ? pool.limit : 0, pool.ranks - 1);
}

void *pyhvd_pool_take(size_t room) {
    uint32_t size;
    if (room > SIZE_MAX / 2) return NULL;
    size_t bytes = round_up(room, &size);
    head *h = NULL;
    if (try_lock()) {
        h = pool.newest[size];
        if (h) unlink_kept(h);
        *(h ? &pool.counts.reused : &pool.counts.made) += 1;
        pthread_mutex_unlock(&pool.lock);
    }
    if (!h) h = make(bytes, size);
    return h ? (uint8_t *)h + ALIGNED : NULL;
}

// cppcheck-suppress constParameterPointer - it is freed, or kept for another result
void pyhvd_pool_give(void *memory) {
    if (!memory) return;
    head *h = head_of(memory), *freed = h;
    h->older = NULL;
    int64_t now = pyhvd_now();
    if (try_lock()) {
        if (h->bytes <= pool.limit) {
            freed = shrink(pool.limit - h->bytes);
            h->given_ns = now;
            h->newer = NULL;
            h->older = pool.newest[h->size];
            *(h->older ? &h->older->newer : &pool.oldest[h->size]) = h;
            pool.newest[h->size] = h;
            pool.counts.kept += h->bytes;
        }
        pthread_mutex_unlock(&pool.lock);
    }
    free_all(freed);
}

size_t pyhvd_pool_room(const void *memory) { return head_of(memory)->bytes - ALIGNED; }

int64_t pyhvd_pool_tidy(int64_t now) {
    head *h, *freed = NULL;
    if (!try_lock()) return now + PYHVD_POOL_NS / 10;
    while ((h = find_oldest()) && h->given_ns + PYHVD_POOL_NS <= now) {
        unlink_kept(h);
        h->older = freed;
        freed = h;
    }
    int64_t again = h ? h->given_ns : now;
    pthread_mutex_unlock(&pool.lock);
    free_all(freed);
    return atomic_load_explicit(&pyhvd_pool_buffers, memory_order_relaxed) ? again + PYHVD_POOL_NS
                                                                           : 0;
}

pyhvd_pool_counts pyhvd_pool_read(void) {
    pthread_mutex_lock(&pool.lock);
    pyhvd_pool_counts counts = pool.counts;
    pthread_mutex_unlock(&pool.lock);
    return counts;
}
