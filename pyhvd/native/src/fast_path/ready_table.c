#include "common/futex.h"
#include "fast_path/ready_table.h"
#include "common/counters.h"

#include <string.h>

#define LOCK_SPINS 100
#define LOCK_YIELDS 200
#define LOCK_NAP 50000 /* ns: the owner of the lock has lost its core, or has been stopped */
#define ROOM_WAIT 10000000 /* ns; who writes down a response list has other things to do meanwhile */
#define NO_END (-1)

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* ---- where things lie ---- */

static size_t lines(size_t bytes) { return (bytes + PYHVD_LINE - 1) / PYHVD_LINE * PYHVD_LINE; }

static size_t set_bytes(int size, uint32_t slots) {
    return lines(sizeof(pyhvd_board_set)) + lines(slots * sizeof(uint64_t)) +
           lines(slots / 8) * 2 + lines(slots / 64 * sizeof(pyhvd_posts)) * (size_t)size;
}

size_t pyhvd_board_bytes(int size, uint32_t slots) {
    return lines(sizeof(pyhvd_board_head)) + PYHVD_LOG * lines(sizeof(pyhvd_entry)) +
           (size_t)size * sizeof(pyhvd_seat) + PYHVD_BOARD_SETS * set_bytes(size, slots);
}

static pyhvd_entry *entry_at(const pyhvd_board *b, uint64_t place) {
    return (pyhvd_entry *)((uint8_t *)b->log + (place % PYHVD_LOG) * lines(sizeof(pyhvd_entry)));
}

static pyhvd_board_set *set_of(const pyhvd_board *b, uint32_t set) {
    return (pyhvd_board_set *)(b->sets + set * b->set_bytes);
}

static uint64_t *since_of(const pyhvd_board *b, uint32_t set) {
    return (uint64_t *)((uint8_t *)set_of(b, set) + lines(sizeof(pyhvd_board_set)));
}

/* The bit vectors of a set: lent and used; behind them, what each rank has posted. */
static uint64_t *bits_of(const pyhvd_board *b, uint32_t set, int which) {
    return (uint64_t *)((uint8_t *)since_of(b, set) + lines(b->slots * sizeof(uint64_t)) +
                        (size_t)which * lines(b->slots / 8));
}

static uint64_t *lent_of(const pyhvd_board *b, uint32_t set) { return bits_of(b, set, 0); }
static uint64_t *used_of(const pyhvd_board *b, uint32_t set) { return bits_of(b, set, 1); }
static pyhvd_posts *posted_of(const pyhvd_board *b, uint32_t set, uint32_t rank) {
    return (pyhvd_posts *)((uint8_t *)bits_of(b, set, 2) + rank * lines(b->words * sizeof(pyhvd_posts)));
}

void pyhvd_board_attach(pyhvd_board *b, void *base, int rank, int size, uint32_t slots) {
    uint8_t *at = base;
    b->rank = rank;
    b->size = size;
    b->slots = slots;
    b->words = slots / 64;
    b->head = (pyhvd_board_head *)at;
    b->log = (pyhvd_entry *)(at += lines(sizeof(pyhvd_board_head)));
    b->seats = (pyhvd_seat *)(at += PYHVD_LOG * lines(sizeof(pyhvd_entry)));
    b->sets = at + (size_t)size * sizeof(pyhvd_seat);
    b->set_bytes = set_bytes(size, slots);
}

void pyhvd_board_clear(pyhvd_board *b) { memset(b->head, 0, pyhvd_board_bytes(b->size, b->slots)); }

/* ---- the lock ---- */

int pyhvd_board_lock(pyhvd_board *b, int64_t ns) {
    _Atomic uint32_t *lock = &b->head->lock;
    int64_t until = 0;
    for (int yields = 0;; yields++) {
        for (int spin = 0; spin < LOCK_SPINS; spin++) {
            if (!atomic_load_explicit(lock, memory_order_relaxed) &&
                !atomic_exchange_explicit(lock, 1, memory_order_acquire))
                return 1;
            pyhvd_pause();
        }
        if (yields < LOCK_YIELDS) {
            sched_yield();
            continue;
        }
        if (!until) until = pyhvd_after(ns);
        if (pyhvd_now() >= until || atomic_load_explicit(b->over, memory_order_acquire)) return 0;
        pyhvd_nap(LOCK_NAP);
    }
}

static int concerns(const pyhvd_ranks *ranks, uint32_t rank) {
    return (int)(ranks->ranks[rank / 64] >> (rank % 64) & 1);
}

static void wake_seat(pyhvd_seat *seat) {
    if (atomic_load_explicit(&seat->driven, memory_order_relaxed)) {
        if (atomic_load_explicit(&seat->asleep, memory_order_relaxed)) pyhvd_futex_wake(&seat->bell, 0);
    } else if (atomic_load_explicit(&seat->dozing, memory_order_relaxed)) {
        pyhvd_futex_wake(&seat->alarm, 0);
    }
}

void pyhvd_board_unlock(pyhvd_board *b, const pyhvd_ranks *audience) {
    atomic_store_explicit(&b->head->lock, 0, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < b->size; rank++)
        if (rank != b->rank && concerns(audience, (uint32_t)rank)) wake_seat(&b->seats[rank]);
}

void pyhvd_board_call(pyhvd_board *b, int rank, uint32_t reasons) {
    pyhvd_seat *seat = &b->seats[rank];
    atomic_fetch_or_explicit(&seat->calls, reasons, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&seat->dozing, memory_order_relaxed)) {
        pyhvd_futex_wake(&seat->alarm, 0);
    }
}

/* ---- the log ---- */

static int is_for(const pyhvd_entry *entry, uint32_t rank) {
    return (int)(atomic_load_explicit(&entry->audience[rank / 64], memory_order_acquire) >> (rank % 64) & 1);
}

/* Step a rank's cursor past entries that do not concern it, and say where it stands then; returns whether an entry is
 * there, which concerns the rank. */
static int skip_for(pyhvd_board *b, uint32_t rank, uint64_t *place) {
    _Atomic uint64_t *cursor = &b->seats[rank].cursor;
    uint64_t at = atomic_load_explicit(cursor, memory_order_acquire);
    int found = 0;
    while (!found && at < atomic_load_explicit(&b->head->tail, memory_order_acquire)) {
        if (is_for(entry_at(b, at), rank)) {
            uint64_t now = atomic_load_explicit(cursor, memory_order_acquire);
            found = now == at;
            at = now;
        } else if (atomic_compare_exchange_strong_explicit(cursor, &at, at + 1, memory_order_acq_rel,
                                                           memory_order_acquire)) {
            at++;
        }
    }
    *place = at;
    return found;
}

static int has_room(pyhvd_board *b) {
    uint64_t tail = atomic_load_explicit(&b->head->tail, memory_order_relaxed), lowest = tail, place;
    if (tail - b->head->floor < PYHVD_LOG) return 1;
    for (int rank = 0; rank < b->size; rank++) {
        skip_for(b, (uint32_t)rank, &place);
        lowest = MIN(lowest, place);
    }
    b->head->floor = lowest;
    return tail - lowest < PYHVD_LOG;
}

static void add_ranks(pyhvd_ranks *to, const pyhvd_ranks *more) {
    for (size_t k = 0; k < PYHVD_MAX_LOCAL / 64; k++) to->ranks[k] |= more->ranks[k];
}

/* The room at the tail, for an entry that concerns these ranks. */
static pyhvd_entry *begin_entry(pyhvd_board *b, const pyhvd_ranks *audience) {
    pyhvd_entry *entry = entry_at(b, b->head->tail);
    for (size_t k = 0; k < PYHVD_MAX_LOCAL / 64; k++)
        atomic_store_explicit(&entry->audience[k], audience->ranks[k], memory_order_release);
    return entry;
}

/* Publish the entry that was written at the tail. */
static void publish(pyhvd_board *b) {
    uint64_t tail = atomic_load_explicit(&b->head->tail, memory_order_relaxed);
    atomic_store_explicit(&b->head->tail, tail + 1, memory_order_release);
}

int pyhvd_board_list(pyhvd_board *b, uint64_t number, const pyhvd_ranks *audience) {
    pyhvd_ranks woken = {{0}};
    if (!pyhvd_board_lock(b, ROOM_WAIT)) return 0;
    int room = has_room(b);
    if (room) {
        pyhvd_entry *entry = begin_entry(b, audience);
        woken = *audience;
        entry->kind = PYHVD_LIST;
        entry->number = number;
        publish(b);
    }
    pyhvd_board_unlock(b, &woken);
    return room;
}

/* This rank was the last to post what is ready: count for how long others had waited, from when the first of them
 * had last posted a slot of the same word. What has been charged to a rank before is not charged again, so that a
 * set's ranks together are charged with no more than has passed. */
static void charge(pyhvd_board *b, uint32_t set, const uint64_t *ready, uint32_t first, uint32_t last, int64_t now) {
    pyhvd_board_set *s = set_of(b, set);
    pyhvd_seat *seat = &b->seats[b->rank];
    int64_t since = now;
    uint64_t n = 0;
    for (uint32_t w = first; w < last; w++) {
        n += (uint64_t)__builtin_popcountll(ready[w]);
        for (uint32_t k = 0; k < s->count && ready[w]; k++)
            if (s->ranks[k] != (uint32_t)b->rank) since = MIN(since, posted_of(b, set, s->ranks[k])[w].time);
    }
    if (b->head->charged[set] > since) since = b->head->charged[set];
    pyhvd_add(&seat->late, n);
    if (now <= since) return;
    pyhvd_add(&seat->awaited, (uint64_t)(now - since));
    b->head->charged[set] = now;
}

void pyhvd_board_match(pyhvd_board *b, uint32_t set, uint32_t from, uint32_t to, int64_t now,
                       pyhvd_ranks *audience) {
    pyhvd_board_set *s = set_of(b, set);
    uint64_t ready[PYHVD_BOARD_WORDS], *used = used_of(b, set), *lent = lent_of(b, set);
    uint32_t first = to, last = from;
    for (uint32_t w = from; w < to; w++) {
        ready[w] = s->count ? lent[w] : 0;
        for (uint32_t k = 0; k < s->count && ready[w]; k++) ready[w] &= posted_of(b, set, s->ranks[k])[w].bits;
        if (!ready[w]) continue;
        first = MIN(first, w);
        last = w + 1;
    }
    if (first >= last) return;
    if (!has_room(b)) {
        /* Who advances looks for a backlog behind its step: one of the two sees the other. */
        atomic_store_explicit(&b->head->backlog, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        if (!has_room(b)) return;
    }
    pyhvd_entry *entry = begin_entry(b, &s->members);
    entry->kind = PYHVD_BATCH;
    entry->set = set;
    entry->by = (uint32_t)b->rank;
    entry->first = first;
    entry->last = last;
    for (uint32_t w = first; w < last; w++) {
        entry->words[w] = ready[w];
        used[w] |= ready[w];
        for (uint32_t k = 0; k < s->count; k++) posted_of(b, set, s->ranks[k])[w].bits &= ~ready[w];
    }
    if (now && s->count > 1) charge(b, set, ready, first, last, now);
    add_ranks(audience, &s->members);
    publish(b);
}

const pyhvd_entry *pyhvd_board_next(pyhvd_board *b) {
    uint64_t place;
    return skip_for(b, (uint32_t)b->rank, &place) ? entry_at(b, place) : NULL;
}

void pyhvd_board_advance(pyhvd_board *b) {
    atomic_fetch_add_explicit(&b->seats[b->rank].cursor, 1, memory_order_acq_rel);
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&b->head->backlog, memory_order_acquire)) return;
    pyhvd_ranks audience = {{0}};
    if (!pyhvd_board_lock(b, NO_END)) return;
    atomic_store_explicit(&b->head->backlog, 0, memory_order_relaxed);
    for (uint32_t set = 0; set < PYHVD_BOARD_SETS; set++)
        pyhvd_board_match(b, set, 0, b->words, 0, &audience);
    pyhvd_board_unlock(b, &audience);
}

int pyhvd_board_behind(const pyhvd_board *b) {
    return atomic_load_explicit(&b->seats[b->rank].cursor, memory_order_acquire) !=
           atomic_load_explicit(&b->head->tail, memory_order_acquire);
}

/* ---- slots ---- */

/* Whether all slots are lent, and mean what they mean to this rank. Looked up again only once something has changed. */
static int are_lent(const pyhvd_board *b, uint32_t set, pyhvd_posting *p) {
    const uint64_t *lent = lent_of(b, set), *meant = since_of(b, set), changes = set_of(b, set)->changes;
    if (p->checked == changes) return 1;
    for (uint32_t k = 0; k < p->n; k++) {
        uint32_t slot = p->slots[k];
        if (!(lent[slot / 64] >> (slot % 64) & 1) || meant[slot] != p->since[k]) return 0;
    }
    p->checked = changes;
    return 1;
}

int pyhvd_board_post(pyhvd_board *b, uint32_t set, pyhvd_posting *p, int64_t now) {
    pyhvd_posts *mine = posted_of(b, set, (uint32_t)b->rank);
    if (!are_lent(b, set, p)) return 0;
    for (uint32_t k = 0; k < p->n;) {
        uint32_t word = p->slots[k] / 64;
        uint64_t bits = 0;
        for (; k < p->n && p->slots[k] / 64 == word; k++) bits |= (uint64_t)1 << (p->slots[k] % 64);
        mine[word].bits |= bits;
        mine[word].time = now;
    }
    return 1;
}

void pyhvd_board_open(pyhvd_board *b, uint32_t set, const uint32_t *ranks, uint32_t count) {
    pyhvd_ranks nobody = {{0}};
    if (!pyhvd_board_lock(b, NO_END)) return;
    pyhvd_board_set *s = set_of(b, set);
    uint64_t changes = s->changes;
    memset(s, 0, b->set_bytes);
    s->changes = changes + 1;
    b->head->charged[set] = 0;
    s->count = count;
    for (uint32_t k = 0; k < count; k++) {
        s->ranks[k] = ranks[k];
        s->members.ranks[ranks[k] / 64] |= (uint64_t)1 << (ranks[k] % 64);
    }
    pyhvd_board_unlock(b, &nobody);
}

void pyhvd_board_lend(pyhvd_board *b, uint32_t set, uint32_t slot, uint64_t since) {
    pyhvd_ranks nobody = {{0}};
    if (!pyhvd_board_lock(b, NO_END)) return;
    since_of(b, set)[slot] = since;
    lent_of(b, set)[slot / 64] |= (uint64_t)1 << (slot % 64);
    set_of(b, set)->changes++;
    pyhvd_board_unlock(b, &nobody);
}

void pyhvd_board_freeze(pyhvd_board *b, uint32_t set, uint32_t slot) {
    pyhvd_ranks nobody = {{0}};
    if (!pyhvd_board_lock(b, NO_END)) return;
    lent_of(b, set)[slot / 64] &= ~((uint64_t)1 << (slot % 64));
    set_of(b, set)->changes++;
    pyhvd_board_unlock(b, &nobody);
}

void pyhvd_board_recall(pyhvd_board *b, uint32_t set, const uint64_t *bits, uint64_t *posted) {
    pyhvd_ranks nobody = {{0}};
    if (!pyhvd_board_lock(b, NO_END)) return;
    set_of(b, set)->changes++;
    for (uint32_t w = 0; w < b->words; w++) {
        lent_of(b, set)[w] &= ~bits[w];
        for (uint32_t rank = 0; rank < (uint32_t)b->size; rank++) {
            pyhvd_posts *theirs = posted_of(b, set, rank);
            posted[rank * b->words + w] = theirs[w].bits & bits[w];
            theirs[w].bits &= ~bits[w];
        }
    }
    pyhvd_board_unlock(b, &nobody);
}

void pyhvd_board_look(pyhvd_board *b, uint32_t set, uint64_t *posted, uint64_t *used) {
    pyhvd_ranks nobody = {{0}};
    if (!pyhvd_board_lock(b, NO_END)) return;
    for (uint32_t rank = 0; rank < (uint32_t)b->size; rank++)
        for (uint32_t w = 0; w < b->words; w++)
            posted[rank * b->words + w] = posted_of(b, set, rank)[w].bits;
    memcpy(used, used_of(b, set), b->words * sizeof(uint64_t));
    memset(used_of(b, set), 0, b->words * sizeof(uint64_t));
    pyhvd_board_unlock(b, &nobody);
}
