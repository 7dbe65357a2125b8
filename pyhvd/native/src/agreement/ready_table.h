/* The ready table: where the ranks of one node agree on cached tensors, in shared memory and
 * without the GIL.
 *
 * Each process set has cache slots. The coordinator *delegates* a slot to the table once all ranks
 * have cached it, and *recalls* it when a message speaks of its tensor. While a slot is delegated,
 * ranks submit its tensor by *marking* it ready. Once all members of the set have marked a slot,
 * the table clears the marks and appends a *batch* to the ready log. The coordinator appends its
 * response *lists* to the same log, so that one order binds cached and other tensors, and
 * overlapping process sets cannot deadlock.
 *
 * A slot is in one of two places:
 *
 *   from             event     to               effect
 *   ---------------  --------  ---------------  ---------------------------------------------
 *   the coordinator  delegate  the table        ranks may mark it under the given version
 *   the table        match     the table        its marks become an entry of the log
 *   the table        freeze    the coordinator  no rank may mark it; its marks await recall
 *   the table        recall    the coordinator  its marks are cleared and returned
 *
 * A slot's *version* is the number of the response list that gave the slot its meaning. A rank that
 * caches the slot under another version may not mark it. A set's version grows whenever any of its
 * slots is delegated, frozen or recalled; so a call checks its slots once per version of the set.
 *
 * Invariants
 *   1. Everything is read and written under `lock` alone, but for the rank states, the log's
 *      entries, and atomics.
 *   2. An entry is written under the lock, before `tail` is stored (release); ranks read it after
 *      `tail` (acquire).
 *   3. An entry is overwritten only after every rank's `cursor` has passed it.
 *   4. A rank's cursor is moved by the holder of its progress lock past entries that concern the
 *      rank, and by any thread that needs room past entries that do not. Both use atomic
 *      read-modify-write operations.
 *   5. So a rank may look at an entry while another one overwrites it. Of such an entry it reads
 *      one word of `audience` only (stored with release, loaded with acquire), and then its cursor
 *      again: if the word was new, the cursor has moved, and the rank ignores the word.
 *   6. All other words of an entry are read only by ranks that it concerns, whose cursors no other
 *      rank moves.
 *   7. A stopped rank (SIGSTOP, a debugger) may hold the lock. No thread waits for the lock while
 *      it holds the GIL or anything that the watchdog needs, nor after its rank's path was closed.
 *
 * Turn slots
 *   The last word of a set has its turn slots. The n-th call without a name uses turn slot n % PYHVD_TURNS.
 *   A rank publishes a digest of n and of its call with each mark.
 *   1. Digests are written and read under the lock. A digest is valid while its mark is set.
 *   2. Once all members have marked a turn slot, their digests are compared. If they are equal, the slot
 *      is matched like any other. Otherwise the slot is no longer delegated, and its marks are recalled.
 *   3. Of a set with several hosts, each host so compares the digests of its own ranks, and announces the
 *      slot with their digest. The order compares the hosts' digests (host_order.h). If they are unlike,
 *      every host does as in 2, at the same place of the order. As the slot is decided, its round is over.
 *   4. A recalled mark's rank submits its call by message. So the coordinator hears of every turn slot
 *      that lost its delegation, and delegates the slot again after it has answered those messages.
 *   5. The coordinator never takes a mark of a turn slot over: it does not know the call.
 *
 * Wake-ups
 *   1. The holder of a rank's progress lock sleeps on `progress_bell`, with `progress_asleep` set.
 *   2. The background thread sleeps on `background_bell`, with `background_asleep` set.
 *      A thread that sleeps in poll(2) instead sets its flag to PYHVD_POLLS or PYHVD_POLLS_BELL.
 *   3. A sleeper sets its flag, then looks again; a waker writes first, then looks at the flag.
 *      Sequentially consistent fences between the two steps of each make one of them see the other.
 */
#ifndef PYHVD_READY_TABLE_H
#define PYHVD_READY_TABLE_H

#include "common/futex.h"
#include "window/window.h"

/* Process sets with ids below it use the table; others agree by messages. Programs of torch have up to
 * some 20 groups at a time. A set costs about 1 KiB per rank, and 10 KiB; on several hosts 70 KiB. */
#define PYHVD_MAX_SETS 32
#define PYHVD_MAX_SLOTS \
    65536 /* cache slots of a set; a table has as many as the caches of its job */
#define PYHVD_MAX_WORDS (PYHVD_MAX_SLOTS / 64 + 1) /* with the turn slots */
/* A range of slots that are announced, decided, recalled or delegated together spans at most so many
 * words: so log entries, messages and scratch memory have one size for any number of slots. */
#define PYHVD_RANGE_WORDS 64
#define PYHVD_LOG_ENTRIES 256 /* by how many entries the slowest rank may be behind */
#define PYHVD_PAYLOAD 2048    /* bytes of the values in a payload, at most; see payloads.h */
#define PYHVD_PAYLOAD_SLOTS 16
#define PYHVD_TURNS 64 /* turn slots of a set: the bits of one word */

#define PYHVD_OTHER_HOST 0x40000000

enum { PYHVD_BATCH = 1, PYHVD_LIST = 2 };

/* Reasons to wake the background thread. */
enum {
    PYHVD_WAKE_WORK = 1,      /* Python has work of its own */
    PYHVD_WAKE_LIST = 2,      /* a response list is next in the log */
    PYHVD_WAKE_REFUSED = 4,   /* a call was refused */
    PYHVD_WAKE_DONE = 8,      /* a call has ended that has a callback */
    PYHVD_WAKE_ABORTED = 16,  /* a window was aborted */
    PYHVD_WAKE_LOST = 32,     /* another host is lost, or has sent a note */
    PYHVD_WAKE_RECALLED = 64, /* marks were recalled: their calls are refused now */
};

/* The other hosts, if there are any; see agreement.h. */
typedef struct pyhvd_agreement pyhvd_agreement;

/* A set of ranks. */
typedef struct {
    uint64_t ranks[PYHVD_MAX_LOCAL / 64];
} pyhvd_ranks;

/* An entry of the ready log. */
typedef struct {
    /* the ranks that it concerns, as in pyhvd_ranks */
    _Alignas(PYHVD_LINE) _Atomic uint64_t audience[PYHVD_MAX_LOCAL / 64];
    uint32_t kind, set;
    uint64_t number; /* list: the response list's */
    /* batch: the rank (of the job) whose marks completed it, or PYHVD_OTHER_HOST + the host that was
     * the last to announce it */
    uint32_t last_rank;
    uint32_t has_results; /* batch: whether its results lie beside it; see payloads.h */
    uint32_t first, end;  /* batch: it has slots in words [first, end) of the set ... */
    uint64_t words[PYHVD_RANGE_WORDS]; /* ... which are these, word `first` first */
} pyhvd_log_entry;

/* A rank's marks of 64 slots, and when (ns) it made the last one. */
typedef struct {
    uint64_t bits;
    int64_t time;
} pyhvd_ready_word;

/* A tensor in a payload: `count` elements from byte `at` of the values. */
typedef struct {
    uint32_t slot;
    uint16_t set, at;
    uint32_t count;
    uint16_t dtype, op;
    uint64_t round; /* of the slot's announcement */
    double postscale;
} pyhvd_payload_item;

typedef struct {
    uint32_t n, bytes;
    pyhvd_payload_item items[PYHVD_PAYLOAD_SLOTS];
    _Alignas(16) uint8_t values[PYHVD_PAYLOAD];
} pyhvd_payload;

/* What a rank shows the others, on cache lines of its own. */
typedef struct {
    _Alignas(PYHVD_LINE) _Atomic uint64_t cursor; /* position in the log */
    _Alignas(PYHVD_LINE) _Atomic uint32_t progress_lock;
    _Alignas(PYHVD_LINE) _Atomic uint32_t progress_bell;
    _Atomic uint32_t progress_asleep;
    _Atomic uint32_t core; /* where the lock's holder last ran; see pyhvd_current_core */
    _Alignas(PYHVD_LINE) _Atomic uint32_t background_bell;
    _Atomic uint32_t background_asleep;
    /* bits; why Python is wanted on the background thread */
    _Atomic uint32_t wake_reasons;
    _Alignas(PYHVD_LINE) _Atomic uint64_t late; /* tensors that the rank was the last to mark ... */
    /* ... and for how long (ns) others had waited for them */
    _Atomic uint64_t awaited;
    /* over several hosts: values of slots that the rank has marked */
    _Alignas(PYHVD_LINE) pyhvd_payload staged;
} pyhvd_rank_state;

/* A process set. */
typedef struct {
    _Alignas(PYHVD_LINE) uint64_t version; /* never 0 while the set is open; never decreases */
    int64_t
        counted_until; /* until when (ns) its waiting was counted; see pyhvd_ready_table_count_last */
    int spans; /* whether the set's ranks on all hosts agree together, not those here alone */
    pyhvd_ranks members; /* on this host */
    uint32_t count;
    uint32_t ranks[PYHVD_MAX_LOCAL];
} pyhvd_table_set;

/* The table in shared memory. Behind it are arrays, whose length depends on the number of slots: see
 * pyhvd_ready_table. */
typedef struct {
    _Alignas(PYHVD_LINE) _Atomic uint32_t lock;
    _Alignas(PYHVD_LINE) _Atomic uint64_t tail;
    uint64_t lowest_cursor; /* a lower bound of all cursors */
    /* the log was full: some slots may be marked by all and not be in the log */
    _Atomic uint32_t backlog;
    pyhvd_log_entry log[PYHVD_LOG_ENTRIES];
    pyhvd_table_set sets[PYHVD_MAX_SETS];
    pyhvd_rank_state rank_states[]; /* one per rank */
} pyhvd_shared_table;

/* One rank's view. */
typedef struct {
    int rank, size;
    uint32_t slots, words;
    int has_turns; /* whether the last word of each set has turn slots; the same on all ranks */
    pyhvd_shared_table *shared;
    /* Arrays in shared memory: [sets][words] ... */
    uint64_t *delegated, *used; /* `used`: slots of batches since the coordinator last looked */
    uint64_t *versions;         /* ... [sets][slots] ... */
    pyhvd_ready_word *ready;    /* ... and [ranks][sets][words]: marks */
    /* Likewise: slots whose marks were recalled, and which the rank submits by message. Set under the
     * lock, taken by the rank. A recalled mark's call stays in flight until then. */
    _Atomic uint64_t *recalled;
    uint64_t *digests;          /* [ranks][sets][PYHVD_TURNS]: of the marks of turn slots */
    pyhvd_agreement *agreement; /* NULL: all ranks are on one host */
    /* of the fast path: once it is set, no thread waits for the lock */
    const _Atomic uint32_t *closed;
} pyhvd_ready_table;

/* Slots of one set, ascending, that a rank marks together, and their versions on this rank. */
typedef struct {
    uint32_t n;
    uint32_t *ids;
    uint64_t *versions;
    /* the set's version when all were found delegated under `versions`; 0: check again */
    uint64_t checked;
    uint64_t digest; /* of a turn slot: of this turn's call, and of its number */
} pyhvd_slot_list;

static inline void pyhvd_slot_list_renew(pyhvd_slot_list *list, uint32_t k, uint64_t version) {
    list->versions[k] = version;
    list->checked = 0;
}

/* ---- set-up ---- */

size_t pyhvd_ready_table_bytes(int size, uint32_t slots);

/* View a table of that many bytes at `base`, which is aligned to PYHVD_LINE. `slots` is a multiple
 * of 64. */
void pyhvd_ready_table_attach(pyhvd_ready_table *t, void *base, int rank, int size, uint32_t slots);

/* Zero the table; on one rank, before any rank uses it. */
void pyhvd_ready_table_clear(pyhvd_ready_table *t);

/* ---- for the coordinator: each takes the lock, and does nothing after the path was closed ---- */

/* Open a set with these local ranks. On one of several hosts each of them calls it, and only the
 * first call has an effect: the coordinator has recalled all slots of an earlier set before. */
void pyhvd_ready_table_open_set(pyhvd_ready_table *t, uint32_t set, const uint32_t *ranks,
                                uint32_t count, int spans);
void pyhvd_ready_table_delegate(pyhvd_ready_table *t, uint32_t set, uint32_t slot,
                                uint64_t version);

/* Take back the slots in `bits`; `marked`, [size][words], gets which rank had marked which of
 * them. */
void pyhvd_ready_table_recall(pyhvd_ready_table *t, uint32_t set, const uint64_t *bits,
                              uint64_t *marked);

/* Delegate the turn slots in `bits` under a version. */
void pyhvd_ready_table_delegate_turns(pyhvd_ready_table *t, uint32_t set, uint64_t bits,
                                      uint64_t version);

/* Take back the turn slots in `bits`; the ranks that had marked them submit their calls by message. */
void pyhvd_ready_table_recall_turns(pyhvd_ready_table *t, uint32_t set, uint64_t bits);

/* Read all marks, [size][words], and the slots that were used since the last call. */
void pyhvd_ready_table_read(pyhvd_ready_table *t, uint32_t set, uint64_t *marked, uint64_t *used);

/* Append a response list; return 0 if the log is full or the lock cannot be taken now. */
int pyhvd_ready_table_append_list(pyhvd_ready_table *t, uint64_t number,
                                  const pyhvd_ranks *audience);

/* ---- for every rank ---- */

/* Take the lock; return 0 if that takes longer than `ns` (negative: no limit), or the path was
 * closed. */
int pyhvd_ready_table_lock(pyhvd_ready_table *t, int64_t ns);

/* Release the lock, and wake the other ranks in `audience`. */
void pyhvd_ready_table_unlock(pyhvd_ready_table *t, const pyhvd_ranks *audience);

/* Let no rank mark a slot, nor a batch contain it, until the coordinator recalls it. */
void pyhvd_ready_table_freeze(pyhvd_ready_table *t, uint32_t set, uint32_t slot);

/* Under the lock: mark slots, all or none; return 0 if one is not delegated under its version.
 * `now`: the time (ns). */
int pyhvd_ready_table_mark_ready(const pyhvd_ready_table *t, uint32_t set, pyhvd_slot_list *list,
                                 int64_t now);

/* Under the lock: append batches of the slots in words [from, to) that all members have marked, and
 * add the members to `audience`. `now` is when this rank marked the last of them, or 0 if another
 * rank may have done so. */
void pyhvd_ready_table_match(pyhvd_ready_table *t, uint32_t set, uint32_t from, uint32_t to,
                             int64_t now, pyhvd_ranks *audience);

/* Return the entry at this rank's cursor, after entries that do not concern the rank; NULL if there
 * is none. */
const pyhvd_log_entry *pyhvd_ready_table_next(pyhvd_ready_table *t);

/* Move the cursor past the entry; append batches for which the log had no room. */
void pyhvd_ready_table_advance(pyhvd_ready_table *t);

/* Wake a rank's thread that makes progress or waits for work, if it sleeps. */
void pyhvd_ready_table_wake_progress(const pyhvd_ready_table *t, int rank);
void pyhvd_ready_table_wake_background(const pyhvd_ready_table *t, int rank);

/* After an entry was appended, and a sequentially consistent fence: wake the thread of a rank that
 * makes progress, or will. */
void pyhvd_ready_table_wake_for_entry(const pyhvd_ready_table *t, int rank);

/* Where a set's words of `delegated` and `used`, and its versions, begin. */
static inline size_t pyhvd_words_of_set(const pyhvd_ready_table *t, uint32_t set) {
    return (size_t)set * t->words;
}

static inline size_t pyhvd_slots_of_set(const pyhvd_ready_table *t, uint32_t set) {
    return (size_t)set * t->slots;
}

/* A rank's digests of a set's turn slots. */
static inline uint64_t *pyhvd_digests_of(const pyhvd_ready_table *t, uint32_t set, uint32_t rank) {
    return t->digests + ((size_t)rank * PYHVD_MAX_SETS + set) * PYHVD_TURNS;
}

/* Where a rank's words of `ready` and `recalled` begin in a set. */
static inline size_t pyhvd_words_of_rank(const pyhvd_ready_table *t, uint32_t rank, uint32_t set) {
    return ((size_t)rank * PYHVD_MAX_SETS + set) * t->words;
}

/* Append what found no room in the log, or in the connections to other hosts. */
void pyhvd_ready_table_retry(pyhvd_ready_table *t);

/* ---- for agreement.c, under the lock ---- */

/* Whether the log has room for an entry; if not, the next call of `retry` tries again. */
int pyhvd_ready_table_make_room(pyhvd_ready_table *t);
void pyhvd_ready_table_note_backlog(pyhvd_ready_table *t);

/* Clear all marks of the slots in words [first, end), of which `words` has the first one first. With
 * `recall`, let the ranks that had made them submit their tensors by message. */
void pyhvd_ready_table_clear_marks(pyhvd_ready_table *t, uint32_t set, uint32_t first, uint32_t end,
                                   const uint64_t *words, int recall);

/* What an entry of the log says. */
typedef struct {
    uint32_t kind, set, first, end;
    const uint64_t *words; /* word `first` first; NULL for a list */
    uint64_t number;
    uint32_t last_rank, has_results;
} pyhvd_log_content;

/* Append an entry, for which there is room; add its ranks to `audience`. */
void pyhvd_ready_table_append(pyhvd_ready_table *t, const pyhvd_log_content *content,
                              const pyhvd_ranks *concerned, pyhvd_ranks *audience);

/* A local rank was the last to mark the slots in words [first, end), of which `words` has the first one
 * first, and whose marks are still there: count for how long (ns) the others had waited. */
void pyhvd_ready_table_count_last(pyhvd_ready_table *t, uint32_t rank, uint32_t set,
                                  const uint64_t *words, uint32_t first, uint32_t end);

/* When (ns) a rank last marked a slot of a word. */
static inline int64_t pyhvd_ready_table_marked_ns(const pyhvd_ready_table *t, uint32_t rank,
                                                  uint32_t set, uint32_t word) {
    return t->ready[pyhvd_words_of_rank(t, rank, set) + word].time;
}

/* Whether the log has entries behind this rank's cursor. */
static inline int pyhvd_ready_table_behind(const pyhvd_ready_table *t) {
    return atomic_load_explicit(&t->shared->rank_states[t->rank].cursor, memory_order_acquire) !=
           atomic_load_explicit(&t->shared->tail, memory_order_acquire);
}

/* This rank's position in the log. From any thread. */
static inline uint64_t pyhvd_ready_table_position(const pyhvd_ready_table *t) {
    return atomic_load_explicit(&t->shared->rank_states[t->rank].cursor, memory_order_relaxed);
}

/* Wake a rank's background thread for these reasons. From any thread of any rank. */
void pyhvd_ready_table_wake(pyhvd_ready_table *t, int rank, uint32_t reasons);

#endif
