/* The board: where the ranks of one node agree on cached tensors, in shared memory and without the GIL.
 *
 * For each process set the board knows which cache slots it has been *lent* by the coordinator, and which of
 * them each rank has *posted* (submitted again exactly as the slot remembers it). What every member has
 * posted is taken down and becomes one *batch* in the log. The coordinator's response lists stand in the
 * same log, as *lists*; so one total order binds both lanes, and overlapping sets cannot wait in a circle.
 * A slot is either lent, and its posts lie here, or with the coordinator, which knows its submissions as
 * bits and requests: `recall` moves it back together with its posts.
 *
 * Invariants. All of it but the seats and the log's entries is read and written under `lock` alone. An entry
 * is written under the lock before `tail` (release) says that it is there, and is read after `tail` has been
 * seen (acquire); it is written again only when every rank's `cursor` has passed it. A rank's cursor is moved
 * by the rank's engine, or, past entries that do not concern it, by whoever needs the room: both by
 * compare-and-swap. So a rank may look at an entry past which it has been moved, and which is just written again: of
 * such an entry it reads one word of `audience` only, which is stored with release and read with acquire, and counts
 * only if the cursor still stands there then, as it does not for whoever has read the new word. The rest of an entry
 * is read by the ranks that it concerns, whose cursors nobody else moves.
 * An abandoned job ends by `closed`. A rank that is stopped (SIGSTOP, a debugger) may hold the lock meanwhile: nobody
 * waits for it with the GIL or anything else in hand that the rank's watch needs, nor once the rank has given up.
 *
 * Waking: `driven` says that some thread of a rank drives its engine; if that thread sleeps, `asleep` is set
 * and it sleeps on `bell`. The background thread sleeps on `alarm`, with `dozing` set. Sleepers set their
 * flag and look again; wakers write first and look at the flag then; sequentially consistent fences between
 * the steps make sure that one of them sees the other.
 */
#ifndef PYHVD_BOARD_H
#define PYHVD_BOARD_H

#include <stddef.h>
#include <stdint.h>

#include "common/futex.h"
#include "window/window.h"

#define PYHVD_BOARD_SETS 16    /* process sets with ids below; others agree by messages */
#define PYHVD_BOARD_SLOTS 4096 /* most cache slots of a set */
#define PYHVD_BOARD_WORDS (PYHVD_BOARD_SLOTS / 64)
#define PYHVD_LOG 256          /* entries that the slowest rank may be behind */

enum { PYHVD_BATCH = 1, PYHVD_LIST = 2 };

typedef struct {
    uint64_t ranks[PYHVD_MAX_LOCAL / 64];
} pyhvd_ranks;

/* One decision. */
typedef struct {
    _Atomic uint64_t audience[PYHVD_MAX_LOCAL / 64]; /* as pyhvd_ranks */
    uint32_t kind, set;
    uint64_t number; /* of the response list */
    uint32_t by; /* whose post completed the batch */
    uint32_t first, last; /* words [first, last) are used */
    uint64_t words[PYHVD_BOARD_WORDS];
} pyhvd_entry;

/* One rank's own lines. */
typedef struct {
    _Alignas(PYHVD_LINE) _Atomic uint64_t cursor;
    _Alignas(PYHVD_LINE) _Atomic uint32_t driven;
    _Alignas(PYHVD_LINE) _Atomic uint32_t bell;
    _Atomic uint32_t asleep;
    _Atomic uint32_t core; /* where the rank's engine was last driven; see pyhvd_here */
    _Alignas(PYHVD_LINE) _Atomic uint32_t alarm;
    _Atomic uint32_t dozing;
    _Atomic uint32_t calls; /* why the background thread is wanted in Python: bits of the caller's choice */
    _Alignas(PYHVD_LINE) _Atomic uint64_t late; /* tensors for which the rank was the last to post ... */
    _Atomic uint64_t awaited;                   /* ... and how long (ns) others had waited by then; see charge() */
} pyhvd_seat;

/* What a rank has posted of 64 slots, and when (ns) it last did; side by side, as both go from core to core. */
typedef struct {
    uint64_t bits;
    int64_t time;
} pyhvd_posts;

/* One process set; behind it lie since[slots], lent[words], used[words] and posted[size][words]. */
typedef struct {
    pyhvd_ranks members;
    uint64_t changes; /* of what is lent, and of what it means; never 0 in a set that is open, and never goes back */
    uint32_t count;
    uint32_t ranks[PYHVD_MAX_LOCAL];
} pyhvd_board_set;

typedef struct {
    _Alignas(PYHVD_LINE) _Atomic uint32_t lock;
    _Alignas(PYHVD_LINE) _Atomic uint64_t tail;
    uint64_t floor; /* no cursor is below */
    _Atomic uint32_t backlog; /* the log was full: something that is ready may not have been taken down */
    _Atomic uint32_t closed;
    int64_t charged[PYHVD_BOARD_SETS]; /* until when (ns) a set's waiting has been counted; see charge() */
} pyhvd_board_head;

/* One rank's view. */
typedef struct {
    int rank, size;
    uint32_t slots, words;
    pyhvd_board_head *head;
    pyhvd_entry *log;
    pyhvd_seat *seats;
    uint8_t *sets;
    size_t set_bytes;
    const _Atomic uint32_t *over; /* the lane's `closed`: the rank has given up, whoever waits for the lock stops */
} pyhvd_board;

size_t pyhvd_board_bytes(int size, uint32_t slots);

/* Look at a board of that many bytes at `base`, which is aligned to a line. `slots` is a multiple of 64. */
void pyhvd_board_attach(pyhvd_board *b, void *base, int rank, int size, uint32_t slots);

/* Zero the board; by one rank, before any uses it. */
void pyhvd_board_clear(pyhvd_board *b);

/* ---- for the coordinator; each takes the lock, and does nothing where the rank gives up on it ---- */

void pyhvd_board_open(pyhvd_board *b, uint32_t set, const uint32_t *ranks, uint32_t count);
void pyhvd_board_lend(pyhvd_board *b, uint32_t set, uint32_t slot, uint64_t since);

/* Take back the slots in `bits`; `posted`, [size][words], gets who had posted which of them. */
void pyhvd_board_recall(pyhvd_board *b, uint32_t set, const uint64_t *bits, uint64_t *posted);

/* What is posted, [size][words], and which slots have been used since the last call. */
void pyhvd_board_look(pyhvd_board *b, uint32_t set, uint64_t *posted, uint64_t *used);

/* Write down a response list; 0 if the log is full, or the lock is not to be had: later. */
int pyhvd_board_list(pyhvd_board *b, uint64_t number, const pyhvd_ranks *audience);

/* ---- for every rank ---- */

/* Take the lock; 0 if it is not to be had for so long (negative: no end), or the rank has given up. */
int pyhvd_board_lock(pyhvd_board *b, int64_t ns);

/* Release the lock, and wake the ranks that entries written meanwhile concern. */
void pyhvd_board_unlock(pyhvd_board *b, const pyhvd_ranks *audience);

/* Let nobody post a slot any more, nor what is posted be taken down, until the coordinator has recalled it. */
void pyhvd_board_freeze(pyhvd_board *b, uint32_t set, uint32_t slot);

/* Slots of one set, in ascending order, that a rank posts together, and what they mean to it. */
typedef struct {
    uint32_t n;
    uint32_t *slots;
    uint64_t *since;
    uint64_t checked; /* the set's `changes` when they were last found lent as `since` has them; 0: look again */
} pyhvd_posting;

/* What the k-th of them means to the rank from now on. */
static inline void pyhvd_posting_renew(pyhvd_posting *p, uint32_t k, uint64_t since) {
    p->since[k] = since;
    p->checked = 0;
}

/* Under the lock: post slots, all or none; 0 if one of them is not lent as `since` has it. `now` is the time (ns). */
int pyhvd_board_post(pyhvd_board *b, uint32_t set, pyhvd_posting *p, int64_t now);

/* Under the lock: take down what all members have posted in words [first, last); adds to `audience`. `now` is when
 * this rank posted the last of it, or 0 where that may have been another rank. */
void pyhvd_board_match(pyhvd_board *b, uint32_t set, uint32_t first, uint32_t last, int64_t now,
                       pyhvd_ranks *audience);

/* The entry at this rank's cursor if it concerns the rank; NULL if there is none. Skips what does not. */
const pyhvd_entry *pyhvd_board_next(pyhvd_board *b);

/* Step past the entry at the cursor; takes down what the log had no room for. */
void pyhvd_board_advance(pyhvd_board *b);

/* Whether the log goes on behind this rank's cursor. */
int pyhvd_board_behind(const pyhvd_board *b);

/* How far this rank's engine has come in the log. From any thread. */
static inline uint64_t pyhvd_board_position(const pyhvd_board *b) {
    return atomic_load_explicit(&b->seats[b->rank].cursor, memory_order_relaxed);
}

/* Add reasons to a rank's calls, and wake its background thread. From any thread of any rank. */
void pyhvd_board_call(pyhvd_board *b, int rank, uint32_t reasons);

#endif
