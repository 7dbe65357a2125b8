/* The ready table and its log; ready_table.h states the invariants. */
#include "agreement/ready_table.h"

#include <string.h>

#include "common/counters.h"
#include "agreement/agreement.h"

#define LOCK_SPINS 100
#define LOCK_YIELDS 200
#define LOCK_NAP_NS 50000     /* the lock's holder has lost its core, or was stopped */
#define LIST_LOCK_NS 10000000 /* the thread that appends a list has other work meanwhile */
#define NO_LIMIT (-1)

static const pyhvd_ranks NOBODY;

/* ---- layout ---- */

/* Add an array to the table, from a boundary of a line on; return its offset. */
static size_t place(size_t *bytes, size_t n, size_t item) {
    size_t at = (*bytes + PYHVD_LINE - 1) / PYHVD_LINE * PYHVD_LINE;
    *bytes = at + n * item;
    return at;
}

/* Set the view's arrays, for a table at `base`, and return the table's bytes. */
static size_t lay_out(pyhvd_ready_table *t, uintptr_t base) {
    size_t bytes = sizeof(pyhvd_shared_table) + (size_t)t->size * sizeof(pyhvd_rank_state);
    size_t words = (size_t)PYHVD_MAX_SETS * t->words, marks = (size_t)t->size * words;
    t->shared = (pyhvd_shared_table *)base;
    t->delegated = (uint64_t *)(base + place(&bytes, words, sizeof *t->delegated));
    t->used = (uint64_t *)(base + place(&bytes, words, sizeof *t->used));
    t->versions = (uint64_t *)(base + place(&bytes, 64 * words, sizeof *t->versions));
    t->ready = (pyhvd_ready_word *)(base + place(&bytes, marks, sizeof *t->ready));
    t->recalled = (_Atomic uint64_t *)(base + place(&bytes, marks, sizeof *t->recalled));
    t->digests = (uint64_t *)(base + place(&bytes, (size_t)t->size * PYHVD_MAX_SETS * PYHVD_TURNS,
                                           sizeof *t->digests));
    return bytes;
}

size_t pyhvd_ready_table_bytes(int size, uint32_t slots) {
    pyhvd_ready_table t = {.size = size, .slots = slots, .words = slots / 64};
    return lay_out(&t, 0);
}

static pyhvd_log_entry *entry_at(const pyhvd_ready_table *t, uint64_t position) {
    return &t->shared->log[position % PYHVD_LOG_ENTRIES];
}

/* A rank's marks in a set, by word. */
static pyhvd_ready_word *ready_of(const pyhvd_ready_table *t, uint32_t set, uint32_t rank) {
    return t->ready + pyhvd_words_of_rank(t, rank, set);
}

// cppcheck-suppress constParameterPointer - the view's pointers lead into it
void pyhvd_ready_table_attach(pyhvd_ready_table *t, void *base, int rank, int size,
                              uint32_t slots) {
    t->rank = rank;
    t->size = size;
    t->slots = slots;
    t->words = slots / 64;
    lay_out(t, (uintptr_t)base);
}

void pyhvd_ready_table_clear(pyhvd_ready_table *t) {
    memset(t->shared, 0, pyhvd_ready_table_bytes(t->size, t->slots));
}

/* ---- the lock ---- */

int pyhvd_ready_table_lock(pyhvd_ready_table *t, int64_t ns) {
    _Atomic uint32_t *lock = &t->shared->lock;
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
        if (pyhvd_now() >= until || atomic_load_explicit(t->closed, memory_order_acquire)) return 0;
        pyhvd_nap(LOCK_NAP_NS);
    }
}

/* Wake a sleeper; `bells` has the bells, by rank, for poll(2). */
static void wake_sleeper(_Atomic uint32_t *asleep, _Atomic uint32_t *futex, const int *bells,
                         int rank) {
    uint32_t how = atomic_load_explicit(asleep, memory_order_relaxed);
    if (how == PYHVD_POLLS || how == PYHVD_POLLS_BELL)
        pyhvd_ring_bell(bells[rank]);
    else if (how)
        pyhvd_futex_wake(futex, 0);
}

void pyhvd_ready_table_wake_progress(const pyhvd_ready_table *t, int rank) {
    pyhvd_rank_state *state = &t->shared->rank_states[rank];
    const int *bells = t->agreement ? t->agreement->progress_bells : NULL;
    wake_sleeper(&state->progress_asleep, &state->progress_bell, bells, rank);
}

void pyhvd_ready_table_wake_background(const pyhvd_ready_table *t, int rank) {
    pyhvd_rank_state *state = &t->shared->rank_states[rank];
    const int *bells = t->agreement ? t->agreement->background_bells : NULL;
    wake_sleeper(&state->background_asleep, &state->background_bell, bells, rank);
}

void pyhvd_ready_table_wake_for_entry(const pyhvd_ready_table *t, int rank) {
    if (atomic_load_explicit(&t->shared->rank_states[rank].progress_lock, memory_order_relaxed))
        pyhvd_ready_table_wake_progress(t, rank);
    else
        pyhvd_ready_table_wake_background(t, rank);
}

void pyhvd_ready_table_unlock(pyhvd_ready_table *t, const pyhvd_ranks *audience) {
    atomic_store_explicit(&t->shared->lock, 0, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < t->size; rank++)
        if (rank != t->rank && (audience->ranks[rank / 64] >> (rank % 64) & 1))
            pyhvd_ready_table_wake_for_entry(t, rank);
}

void pyhvd_ready_table_wake(pyhvd_ready_table *t, int rank, uint32_t reasons) {
    atomic_fetch_or_explicit(&t->shared->rank_states[rank].wake_reasons, reasons,
                             memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    pyhvd_ready_table_wake_background(t, rank);
}

/* ---- the log ---- */

static int is_for(const pyhvd_log_entry *entry, uint32_t rank) {
    return (int)(atomic_load_explicit(&entry->audience[rank / 64], memory_order_acquire) >>
                     (rank % 64) &
                 1);
}

/* Move a rank's cursor past entries that do not concern it. Store the cursor in `position`; return
 * whether there is an entry, which concerns the rank. */
static int skip_for(pyhvd_ready_table *t, uint32_t rank, uint64_t *position) {
    _Atomic uint64_t *cursor = &t->shared->rank_states[rank].cursor;
    uint64_t at = atomic_load_explicit(cursor, memory_order_acquire);
    int found = 0;
    while (!found && at < atomic_load_explicit(&t->shared->tail, memory_order_acquire)) {
        if (is_for(entry_at(t, at), rank)) {
            uint64_t now = atomic_load_explicit(cursor, memory_order_acquire);
            found = now == at;
            at = now;
        } else if (atomic_compare_exchange_strong_explicit(
                       cursor, &at, at + 1, memory_order_acq_rel, memory_order_acquire)) {
            at++;
        }
    }
    *position = at;
    return found;
}

/* Under the lock: return whether the log has room for another entry. */
static int has_room(pyhvd_ready_table *t) {
    uint64_t tail = atomic_load_explicit(&t->shared->tail, memory_order_relaxed), lowest = tail,
             position;
    if (tail - t->shared->lowest_cursor < PYHVD_LOG_ENTRIES) return 1;
    for (int rank = 0; rank < t->size; rank++) {
        skip_for(t, (uint32_t)rank, &position);
        lowest = MIN(lowest, position);
    }
    t->shared->lowest_cursor = lowest;
    return tail - lowest < PYHVD_LOG_ENTRIES;
}

int pyhvd_ready_table_append_list(pyhvd_ready_table *t, uint64_t number,
                                  const pyhvd_ranks *audience) {
    pyhvd_log_content content = {.kind = PYHVD_LIST, .number = number};
    pyhvd_ranks woken = {{0}};
    if (!pyhvd_ready_table_lock(t, LIST_LOCK_NS)) return 0;
    int room = has_room(t);
    if (room) pyhvd_ready_table_append(t, &content, audience, &woken);
    pyhvd_ready_table_unlock(t, &woken);
    return room;
}

/*   1. The wait begins when the first of the others last marked a slot of the same word.
 *   2. Time that was counted before is not counted again, so the ranks of a set together are not
 *      charged with more time than has passed. */
void pyhvd_ready_table_count_last(pyhvd_ready_table *t, uint32_t rank, uint32_t set,
                                  const uint64_t *words, uint32_t first, uint32_t end) {
    pyhvd_table_set *s = &t->shared->sets[set];
    pyhvd_rank_state *last = &t->shared->rank_states[rank];
    int64_t since = INT64_MAX, until = 0;
    uint64_t n = 0;
    for (uint32_t w = first; w < end; w++) {
        n += (uint64_t)__builtin_popcountll(words[w - first]);
        for (uint32_t k = 0; k < s->count && words[w - first]; k++) {
            int64_t marked = pyhvd_ready_table_marked_ns(t, s->ranks[k], set, w);
            if (s->ranks[k] != rank)
                since = MIN(since, marked);
            else
                until = MAX(until, marked);
        }
    }
    since = MAX(since, s->counted_until);
    pyhvd_add(&last->late, n);
    if (until <= since) return;
    pyhvd_add(&last->awaited, (uint64_t)(until - since));
    s->counted_until = until;
}

void pyhvd_ready_table_note_backlog(pyhvd_ready_table *t) {
    atomic_store_explicit(&t->shared->backlog, 1, memory_order_relaxed);
}

int pyhvd_ready_table_make_room(pyhvd_ready_table *t) {
    if (has_room(t)) return 1;
    /* `advance` moves the cursor, then reads `backlog`; here it is the other way round. One sees
     * the other. */
    pyhvd_ready_table_note_backlog(t);
    atomic_thread_fence(memory_order_seq_cst);
    return has_room(t);
}

/* The slots of a word that all local members have marked. */
static uint64_t complete_slots(const pyhvd_ready_table *t, uint32_t set, uint32_t word) {
    const pyhvd_table_set *s = &t->shared->sets[set];
    uint64_t complete = s->count ? t->delegated[pyhvd_words_of_set(t, set) + word] : 0;
    for (uint32_t k = 0; k < s->count && complete; k++)
        complete &= ready_of(t, set, s->ranks[k])[word].bits;
    return complete;
}

void pyhvd_ready_table_clear_marks(pyhvd_ready_table *t, uint32_t set, uint32_t first, uint32_t end,
                                   const uint64_t *words, int recall) {
    const pyhvd_table_set *s = &t->shared->sets[set];
    for (uint32_t k = 0; k < s->count; k++) {
        size_t at = pyhvd_words_of_rank(t, s->ranks[k], set);
        int any = 0;
        for (uint32_t w = first; w < end; w++) {
            uint64_t marked = t->ready[at + w].bits & words[w - first];
            t->ready[at + w].bits ^= marked;
            if (!recall || !marked) continue;
            atomic_fetch_or_explicit(&t->recalled[at + w], marked, memory_order_relaxed);
            any = 1;
        }
        if (any) pyhvd_ready_table_wake(t, (int)s->ranks[k], PYHVD_WAKE_RECALLED);
    }
}

void pyhvd_ready_table_append(pyhvd_ready_table *t, const pyhvd_log_content *content,
                              const pyhvd_ranks *concerned, pyhvd_ranks *audience) {
    uint64_t tail = atomic_load_explicit(&t->shared->tail, memory_order_relaxed);
    pyhvd_log_entry *entry = entry_at(t, tail);
    for (size_t k = 0; k < PYHVD_MAX_LOCAL / 64; k++) {
        atomic_store_explicit(&entry->audience[k], concerned->ranks[k], memory_order_release);
        audience->ranks[k] |= concerned->ranks[k];
    }
    entry->kind = content->kind;
    entry->number = content->number;
    entry->set = content->set;
    entry->last_rank = content->last_rank;
    entry->has_results = content->has_results;
    entry->first = content->first;
    entry->end = content->end;
    for (uint32_t k = 0; k < content->end - content->first; k++)
        entry->words[k] = content->words[k];
    atomic_store_explicit(&t->shared->tail, tail + 1, memory_order_release);
}

/* Append, or announce, the complete slots `batch` in words [first, end), a range. */
static void match_range(pyhvd_ready_table *t, uint32_t set, uint32_t first, uint32_t end,
                        const uint64_t *batch, int64_t now, pyhvd_ranks *audience) {
    pyhvd_table_set *s = &t->shared->sets[set];
    if (s->spans) {
        pyhvd_agreement_announce(t, set, first, end, batch, audience);
        return;
    }
    if (!pyhvd_ready_table_make_room(t)) return;
    uint64_t *used = t->used + pyhvd_words_of_set(t, set);
    for (uint32_t w = first; w < end; w++) used[w] |= batch[w - first];
    pyhvd_ready_table_clear_marks(t, set, first, end, batch, 0);
    pyhvd_log_content content = {.kind = PYHVD_BATCH,
                                 .set = set,
                                 .first = first,
                                 .end = end,
                                 .words = batch,
                                 .last_rank = (uint32_t)t->rank};
    if (now && s->count > 1)
        pyhvd_ready_table_count_last(t, (uint32_t)t->rank, set, batch, first, end);
    if (t->agreement) content.last_rank = t->agreement->ranks[t->rank];
    pyhvd_ready_table_append(t, &content, &s->members, audience);
}

/* Under the lock: let no rank mark these turn slots; the ranks that had marked them submit their calls
 * by message. */
static void recall_turns(pyhvd_ready_table *t, uint32_t set, uint64_t bits) {
    uint32_t word = t->words - 1;
    t->delegated[pyhvd_words_of_set(t, set) + word] &= ~bits;
    t->shared->sets[set].version++;
    pyhvd_ready_table_clear_marks(t, set, word, word + 1, &bits, 1);
}

/* Recall the turn slots that the members have marked for different calls. */
static void recall_unlike(pyhvd_ready_table *t, uint32_t set) {
    const pyhvd_table_set *s = &t->shared->sets[set];
    uint64_t unlike = 0;
    for (uint64_t bits = complete_slots(t, set, t->words - 1); bits; bits &= bits - 1) {
        int turn = __builtin_ctzll(bits);
        uint64_t first = pyhvd_digests_of(t, set, s->ranks[0])[turn];
        for (uint32_t k = 1; k < s->count; k++)
            if (pyhvd_digests_of(t, set, s->ranks[k])[turn] != first) unlike |= (uint64_t)1 << turn;
    }
    if (unlike) recall_turns(t, set, unlike);
}

void pyhvd_ready_table_match(pyhvd_ready_table *t, uint32_t set, uint32_t from, uint32_t to,
                             int64_t now, pyhvd_ranks *audience) {
    uint64_t batch[PYHVD_RANGE_WORDS];
    if (t->has_turns && to == t->words) recall_unlike(t, set);
    for (uint32_t w = from, first; w < to;) {
        while (w < to && !(batch[0] = complete_slots(t, set, w))) w++;
        if (w == to) return;
        uint32_t end = (first = w++) + 1;
        for (; w < to && w - first < PYHVD_RANGE_WORDS; w++)
            if ((batch[w - first] = complete_slots(t, set, w))) end = w + 1;
        match_range(t, set, first, end, batch, now, audience);
    }
}

const pyhvd_log_entry *pyhvd_ready_table_next(pyhvd_ready_table *t) {
    uint64_t position;
    return skip_for(t, (uint32_t)t->rank, &position) ? entry_at(t, position) : NULL;
}

void pyhvd_ready_table_advance(pyhvd_ready_table *t) {
    atomic_fetch_add_explicit(&t->shared->rank_states[t->rank].cursor, 1, memory_order_acq_rel);
    atomic_thread_fence(memory_order_seq_cst);
    pyhvd_ready_table_retry(t);
}

void pyhvd_ready_table_retry(pyhvd_ready_table *t) {
    if (!atomic_load_explicit(&t->shared->backlog, memory_order_acquire)) return;
    pyhvd_ranks audience = {{0}};
    if (!pyhvd_ready_table_lock(t, NO_LIMIT)) return;
    atomic_store_explicit(&t->shared->backlog, 0, memory_order_relaxed);
    for (uint32_t set = 0; set < PYHVD_MAX_SETS; set++)
        pyhvd_ready_table_match(t, set, 0, t->words, 0, &audience);
    if (t->agreement) pyhvd_agreement_carry_on(t, &audience);
    pyhvd_ready_table_unlock(t, &audience);
    if (t->agreement) pyhvd_agreement_send(t);
}

/* ---- slots ---- */

/* Return whether all slots are delegated under their versions; checked once per version of the
 * set. */
static int are_delegated(const pyhvd_ready_table *t, uint32_t set, pyhvd_slot_list *list) {
    uint64_t version = t->shared->sets[set].version;
    const uint64_t *delegated = t->delegated + pyhvd_words_of_set(t, set);
    const uint64_t *versions = t->versions + pyhvd_slots_of_set(t, set);
    if (version && list->checked == version) return 1; /* 0: the set is not open yet */
    for (uint32_t k = 0; k < list->n; k++) {
        uint32_t slot = list->ids[k];
        if (!(delegated[slot / 64] >> (slot % 64) & 1) || versions[slot] != list->versions[k])
            return 0;
    }
    list->checked = version;
    return 1;
}

int pyhvd_ready_table_mark_ready(const pyhvd_ready_table *t, uint32_t set, pyhvd_slot_list *list,
                                 int64_t now) {
    pyhvd_ready_word *mine = ready_of(t, set, (uint32_t)t->rank);
    if (!are_delegated(t, set, list)) return 0;
    if (t->has_turns && list->ids[0] / 64 == t->words - 1)
        pyhvd_digests_of(t, set, (uint32_t)t->rank)[list->ids[0] % 64] = list->digest;
    for (uint32_t k = 0; k < list->n;) {
        uint32_t word = list->ids[k] / 64;
        uint64_t bits = 0;
        for (; k < list->n && list->ids[k] / 64 == word; k++)
            bits |= (uint64_t)1 << (list->ids[k] % 64);
        mine[word].bits |= bits;
        mine[word].time = now;
    }
    return 1;
}

void pyhvd_ready_table_open_set(pyhvd_ready_table *t, uint32_t set, const uint32_t *ranks,
                                uint32_t count, int spans) {
    if (!pyhvd_ready_table_lock(t, NO_LIMIT)) return;
    pyhvd_table_set *s = &t->shared->sets[set];
    uint64_t version = s->version;
    if (t->agreement && version && s->count == count && s->spans == spans &&
        !memcmp(s->ranks, ranks, count * sizeof *ranks)) {
        pyhvd_ready_table_unlock(t, &NOBODY);
        return;
    }
    memset(s, 0, sizeof *s);
    s->version = version + 1;
    s->count = count;
    s->spans = spans;
    /* On one of several hosts, the order may have delegated turn slots already. */
    if (!t->agreement)
        memset(t->delegated + pyhvd_words_of_set(t, set), 0, t->words * sizeof *t->delegated);
    memset(t->used + pyhvd_words_of_set(t, set), 0, t->words * sizeof *t->used);
    for (uint32_t rank = 0; rank < (uint32_t)t->size; rank++)
        memset(ready_of(t, set, rank), 0, t->words * sizeof(pyhvd_ready_word));
    for (uint32_t k = 0; k < count; k++) {
        s->ranks[k] = ranks[k];
        s->members.ranks[ranks[k] / 64] |= (uint64_t)1 << (ranks[k] % 64);
    }
    pyhvd_ready_table_unlock(t, &NOBODY);
}

void pyhvd_ready_table_delegate(pyhvd_ready_table *t, uint32_t set, uint32_t slot,
                                uint64_t version) {
    if (!pyhvd_ready_table_lock(t, NO_LIMIT)) return;
    t->versions[pyhvd_slots_of_set(t, set) + slot] = version;
    t->delegated[pyhvd_words_of_set(t, set) + slot / 64] |= (uint64_t)1 << (slot % 64);
    t->shared->sets[set].version++;
    pyhvd_ready_table_unlock(t, &NOBODY);
}

void pyhvd_ready_table_freeze(pyhvd_ready_table *t, uint32_t set, uint32_t slot) {
    if (!pyhvd_ready_table_lock(t, NO_LIMIT)) return;
    t->delegated[pyhvd_words_of_set(t, set) + slot / 64] &= ~((uint64_t)1 << (slot % 64));
    t->shared->sets[set].version++;
    pyhvd_ready_table_unlock(t, &NOBODY);
}

void pyhvd_ready_table_recall(pyhvd_ready_table *t, uint32_t set, const uint64_t *bits,
                              uint64_t *marked) {
    if (!pyhvd_ready_table_lock(t, NO_LIMIT)) return;
    uint64_t *delegated = t->delegated + pyhvd_words_of_set(t, set);
    t->shared->sets[set].version++;
    for (uint32_t w = 0; w < t->words; w++) {
        delegated[w] &= ~bits[w];
        for (uint32_t rank = 0; rank < (uint32_t)t->size; rank++) {
            pyhvd_ready_word *theirs = ready_of(t, set, rank);
            marked[rank * t->words + w] = theirs[w].bits & bits[w];
            theirs[w].bits &= ~bits[w];
        }
    }
    pyhvd_ready_table_unlock(t, &NOBODY);
}

void pyhvd_ready_table_delegate_turns(pyhvd_ready_table *t, uint32_t set, uint64_t bits,
                                      uint64_t version) {
    if (!pyhvd_ready_table_lock(t, NO_LIMIT)) return;
    uint64_t *versions = t->versions + pyhvd_slots_of_set(t, set) + t->slots - PYHVD_TURNS;
    for (uint64_t left = bits; left; left &= left - 1) versions[__builtin_ctzll(left)] = version;
    t->delegated[pyhvd_words_of_set(t, set) + t->words - 1] |= bits;
    t->shared->sets[set].version++;
    pyhvd_ready_table_unlock(t, &NOBODY);
}

void pyhvd_ready_table_recall_turns(pyhvd_ready_table *t, uint32_t set, uint64_t bits) {
    if (!pyhvd_ready_table_lock(t, NO_LIMIT)) return;
    recall_turns(t, set, bits);
    pyhvd_ready_table_unlock(t, &NOBODY);
}

void pyhvd_ready_table_read(pyhvd_ready_table *t, uint32_t set, uint64_t *marked, uint64_t *used) {
    if (!pyhvd_ready_table_lock(t, NO_LIMIT)) return;
    for (uint32_t rank = 0; rank < (uint32_t)t->size; rank++)
        for (uint32_t w = 0; w < t->words; w++)
            marked[rank * t->words + w] = ready_of(t, set, rank)[w].bits;
    uint64_t *since_last = t->used + pyhvd_words_of_set(t, set);
    memcpy(used, since_last, t->words * sizeof *used);
    memset(since_last, 0, t->words * sizeof *used);
    pyhvd_ready_table_unlock(t, &NOBODY);
}
