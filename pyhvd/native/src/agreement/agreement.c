/* Agreement between hosts; agreement.h states the invariants. */
#include "agreement/agreement.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>

#include "common/portable.h"

#define READS 16 /* from one connection before the next one's turn */
#define LOCK_NS 1000000000
#define LOOK_NS 10000000 /* between two looks, as another rank may receive */
#define LAST_NAP_NS 1000000
#define MESSAGE_MAX (PYHVD_FRAME_MAX - sizeof(frame_header))

/* The kinds of frames. */
enum { ORDER = 1, RING, NOTE, GOODBYE, BEAT, PAYLOAD };

typedef struct {
    uint32_t bytes; /* with this header; a multiple of 8 */
    uint32_t kind;
} frame_header;

static size_t padded(size_t bytes) { return (bytes + 7) & ~(size_t)7; }

/* ---- set-up ---- */

static size_t shared_bytes(uint32_t hosts) {
    return sizeof(pyhvd_shared_agreement) + hosts * sizeof(pyhvd_peer_host);
}

size_t pyhvd_agreement_bytes(const pyhvd_agreement *a, uint32_t slots) {
    return shared_bytes(a->tree.hosts) + pyhvd_host_tree_bytes(&a->tree, PYHVD_MAX_SETS, slots);
}

void pyhvd_agreement_attach(pyhvd_agreement *a, void *base, uint32_t slots) {
    a->shared = base;
    pyhvd_host_tree_attach(&a->tree, (uint8_t *)base + shared_bytes(a->tree.hosts), PYHVD_MAX_SETS,
                           slots);
}

void pyhvd_agreement_clear(pyhvd_agreement *a, uint32_t slots) {
    memset(a->shared, 0, pyhvd_agreement_bytes(a, slots));
    pyhvd_host_tree_clear(&a->tree, PYHVD_MAX_SETS, slots);
}

/* ---- writing frames, under the table's lock ---- */

static size_t free_bytes(const pyhvd_peer_host *peer) {
    return PYHVD_OUT_RING - (size_t)(atomic_load_explicit(&peer->written, memory_order_relaxed) -
                                     atomic_load_explicit(&peer->sent, memory_order_acquire));
}

/* Whether any two frames, a payload and its announcement, can be written for each of the neighbours
 * [from, to). */
static int has_room(const pyhvd_agreement *a, uint32_t from, uint32_t to) {
    for (uint32_t k = from; k < to; k++)
        if (free_bytes(&a->shared->peers[a->tree.neighbours[k]]) < 2 * PYHVD_FRAME_MAX) return 0;
    return 1;
}

static uint64_t put(pyhvd_peer_host *peer, uint64_t at, const void *bytes, size_t n) {
    size_t from = at % PYHVD_OUT_RING, first = MIN(n, PYHVD_OUT_RING - from);
    memcpy(peer->out + from, bytes, first);
    memcpy(peer->out, (const uint8_t *)bytes + first, n - first);
    return at + n;
}

/* Write a frame for a host, which has room for it. `bytes` is readable up to a multiple of 8. */
static void write_to(const pyhvd_agreement *a, uint32_t host, uint32_t kind, const void *bytes,
                     size_t n) {
    pyhvd_peer_host *peer = &a->shared->peers[host];
    frame_header header = {(uint32_t)(sizeof header + padded(n)), kind};
    uint64_t at = atomic_load_explicit(&peer->written, memory_order_relaxed);
    at = put(peer, at, &header, sizeof header);
    at = put(peer, at, bytes, padded(n));
    atomic_store_explicit(&peer->written, at, memory_order_release);
}

/* Write a message of the order above, or a payload. */
static void write_above(const pyhvd_agreement *a, uint32_t kind, const void *bytes, size_t n) {
    for (uint32_t k = 0; k < a->tree.above; k++) write_to(a, a->tree.neighbours[k], kind, bytes, n);
}

/* ---- the order, under the table's lock ---- */

static void lose_here(pyhvd_ready_table *t, uint32_t host, int error);

/* Count who was last for a batch, whose marks are still there; return the log entry's `last_rank`. The
 * wait for another host begins when the last local rank last marked a slot of the same word, and ends
 * with the host's message. Time counts once, as in pyhvd_ready_table_count_last. */
static uint32_t count_last(pyhvd_ready_table *t, const pyhvd_order_entry *decided) {
    const pyhvd_table_set *s = &t->shared->sets[decided->set];
    pyhvd_shared_agreement *shared = t->agreement->shared;
    pyhvd_peer_host *last = &shared->peers[shared->announcer];
    int64_t since = shared->counted_until;
    uint64_t n = 0;
    for (uint32_t w = decided->first; w < decided->end; w++) {
        n += (uint64_t)__builtin_popcountll(decided->words[w - decided->first]);
        for (uint32_t k = 0; k < s->count && decided->words[w - decided->first]; k++)
            since = MAX(since, pyhvd_ready_table_marked_ns(t, s->ranks[k], decided->set, w));
    }
    pyhvd_add(&last->counters.late, n);
    if (shared->announcer == t->agreement->tree.host) {
        pyhvd_ready_table_count_last(t, shared->announcing_rank, decided->set, decided->words,
                                     decided->first, decided->end);
        return t->agreement->ranks[shared->announcing_rank];
    }
    int64_t until = atomic_load_explicit(&last->heard_ns, memory_order_relaxed);
    if (until > since) {
        pyhvd_add(&last->counters.awaited, (uint64_t)(until - since));
        shared->counted_until = until;
    }
    return PYHVD_OTHER_HOST + shared->announcer;
}

/* Append to the ready log the batch that the order has decided. */
static void append_batch(pyhvd_ready_table *t, const pyhvd_order_entry *decided,
                         pyhvd_ranks *audience) {
    pyhvd_table_set *s = &t->shared->sets[decided->set];
    int reduced = pyhvd_payloads_reduce(t, decided);
    if (reduced < 0) lose_here(t, (uint32_t)-reduced, EPROTO); /* and so does every host */
    pyhvd_log_content content = {.kind = PYHVD_BATCH,
                                 .set = decided->set,
                                 .first = decided->first,
                                 .end = decided->end,
                                 .words = decided->words,
                                 .last_rank = count_last(t, decided),
                                 .has_results = reduced > 0};
    pyhvd_ready_table_clear_marks(t, decided->set, decided->first, decided->end, decided->words, 0);
    uint64_t *used = t->used + pyhvd_words_of_set(t, decided->set);
    for (uint32_t w = decided->first; w < decided->end; w++)
        used[w] |= decided->words[w - decided->first];
    pyhvd_ready_table_append(t, &content, &s->members, audience);
}

/* Take slots back from the table; the ranks that had marked them submit their tensors again. */
static void recall(pyhvd_ready_table *t, const pyhvd_slot_range *range) {
    uint64_t *delegated = t->delegated + pyhvd_words_of_set(t, range->set);
    for (uint32_t w = range->first; w < range->end; w++)
        delegated[w] &= ~range->words[w - range->first];
    t->shared->sets[range->set].version++;
    pyhvd_ready_table_clear_marks(t, range->set, range->first, range->end, range->words, 1);
}

/* Carry out a batch that the order has decided. Its turn slots with unlike digests are recalled. */
static void carry_out_batch(pyhvd_ready_table *t, pyhvd_order_entry *decided,
                            pyhvd_ranks *audience) {
    if (!decided->unlike) {
        append_batch(t, decided, audience);
        return;
    }
    uint32_t last = t->words - 1;
    uint64_t *turns = &decided->words[last - decided->first], every = *turns, left = 0;
    pyhvd_slot_range unlike = {
        .set = decided->set, .first = last, .end = t->words, .words = &decided->unlike};
    recall(t, &unlike);
    *turns &= ~decided->unlike;
    for (uint32_t w = decided->first; w < decided->end; w++)
        left |= decided->words[w - decided->first];
    if (left) append_batch(t, decided, audience);
    *turns = every; /* the payloads of all its slots are over */
}

static void delegate(const pyhvd_ready_table *t, const pyhvd_slot_range *range) {
    uint64_t *delegated = t->delegated + pyhvd_words_of_set(t, range->set);
    uint64_t *versions = t->versions + pyhvd_slots_of_set(t, range->set);
    uint64_t k = 0;
    for (uint32_t w = range->first; w < range->end; w++)
        for (uint64_t bits = range->words[w - range->first]; bits; bits &= bits - 1, k++) {
            uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(bits);
            versions[slot] = range->values[range->n > 1 ? k : 0];
            delegated[w] |= bits & -bits;
        }
    t->shared->sets[range->set].version++;
}

/* Carry out what a list says of the slots, and append the list itself for the local ranks that it
 * concerns. */
static void append_list(pyhvd_ready_table *t, pyhvd_order_entry *list, pyhvd_ranks *audience) {
    pyhvd_slot_range range;
    pyhvd_ranks concerned = {{0}};
    int any = 0;
    for (uint32_t q = 0; q < (uint32_t)t->size; q++) {
        uint32_t rank = t->agreement->ranks[q];
        if (rank / 8 < list->audience_bytes && (list->audience[rank / 8] >> (rank % 8) & 1)) {
            concerned.ranks[q / 64] |= (uint64_t)1 << (q % 64);
            any = 1;
        }
    }
    uint64_t number = list->number;
    while (pyhvd_host_order_next_range(t->agreement->tree.order, list, &range)) {
        if (range.kind == PYHVD_RECALLED)
            recall(t, &range);
        else
            delegate(t, &range);
    }
    pyhvd_log_content content = {.kind = PYHVD_LIST, .number = number};
    if (number && any) pyhvd_ready_table_append(t, &content, &concerned, audience);
}

/* Write the messages that pass an entry on to the children. */
static void pass_on(pyhvd_agreement *a, const pyhvd_order_entry *entry) {
    for (uint32_t k = a->tree.above; k < a->tree.n; k++) {
        uint32_t child = a->tree.neighbours[k];
        int64_t bytes = pyhvd_host_tree_pass(&a->tree, child, entry, a->frame, MESSAGE_MAX);
        if (bytes > 0) write_to(a, child, ORDER, a->frame, (size_t)bytes);
    }
}

/* Append what the order has decided, as far as the ready log and the children have room. */
static void append_decided(pyhvd_ready_table *t, pyhvd_ranks *audience) {
    pyhvd_agreement *a = t->agreement;
    pyhvd_order_entry entry;
    while (pyhvd_ready_table_make_room(t) && has_room(a, a->tree.above, a->tree.n) &&
           pyhvd_host_tree_take(&a->tree, &entry)) {
        pass_on(a, &entry);
        if (entry.kind == PYHVD_BATCH)
            carry_out_batch(t, &entry, audience);
        else
            append_list(t, &entry, audience);
        pyhvd_payloads_settle(t, &entry);
    }
}

void pyhvd_agreement_carry_on(pyhvd_ready_table *t, pyhvd_ranks *audience) {
    pyhvd_agreement *a = t->agreement;
    append_decided(t, audience);
    if (!has_room(a, 0, a->tree.n)) {
        pyhvd_ready_table_note_backlog(t);
        return;
    }
    int64_t bytes = pyhvd_host_order_owed(a->tree.order, a->frame, MESSAGE_MAX);
    if (bytes <= 0) return;
    write_above(a, ORDER, a->frame, (size_t)bytes);
    append_decided(t, audience); /* the own count was what was missing */
}

void pyhvd_agreement_announce(pyhvd_ready_table *t, uint32_t set, uint32_t first, uint32_t end,
                              const uint64_t *words, pyhvd_ranks *audience) {
    pyhvd_agreement *a = t->agreement;
    uint64_t digests[PYHVD_TURNS];
    int compares = t->has_turns && end == t->words;
    pyhvd_slot_range range = {PYHVD_ANNOUNCED, set,  first, end,
                              words,           NULL, 0,     compares ? digests : NULL};
    if (!has_room(a, 0, a->tree.above)) {
        pyhvd_ready_table_note_backlog(t);
        return;
    }
    if (compares) /* the local ones are alike */
        memcpy(digests, pyhvd_digests_of(t, set, t->shared->sets[set].ranks[0]), sizeof digests);
    size_t payload = pyhvd_payloads_collect(t, set, first, end, words, (uint8_t *)a->frame);
    if (payload) write_above(a, PAYLOAD, a->frame, payload);
    int64_t bytes = pyhvd_host_tree_announce(&a->tree, &range, NULL, a->frame, MESSAGE_MAX);
    if (bytes == PYHVD_LATER) pyhvd_ready_table_note_backlog(t);
    if (bytes <= 0) return;
    if (!a->relays) {
        a->shared->announcer = a->tree.host;
        a->shared->announcing_rank = (uint32_t)t->rank;
    }
    write_above(a, ORDER, a->frame, (size_t)bytes);
    pyhvd_agreement_carry_on(t, audience);
}

int pyhvd_agreement_announce_list(pyhvd_ready_table *t, const pyhvd_order_list *list) {
    pyhvd_agreement *a = t->agreement;
    pyhvd_ranks audience = {{0}};
    if (!pyhvd_ready_table_lock(t, LOCK_NS)) return 0;
    int64_t bytes = 0;
    if (has_room(a, 0, a->tree.above))
        bytes = pyhvd_host_tree_announce(&a->tree, NULL, list, a->frame, MESSAGE_MAX);
    if (bytes > 0) {
        write_above(a, ORDER, a->frame, (size_t)bytes);
        pyhvd_agreement_carry_on(t, &audience);
    }
    pyhvd_ready_table_unlock(t, &audience);
    pyhvd_agreement_send(t);
    return bytes > 0;
}

/* Add the slots of a set that some hosts of an order have announced, to the rows of the hosts; the
 * first row is that of the order's host 0. */
static void read_order(const pyhvd_host_order *o, uint32_t set, uint64_t *rows) {
    for (uint32_t w = 0; w < o->words; w++)
        for (uint32_t k = 0; k < 64; k++) {
            uint64_t hosts = pyhvd_order_group_at(o, set, w)->current[k].hosts;
            for (; hosts; hosts &= hosts - 1)
                rows[(uint32_t)__builtin_ctzll(hosts) * o->words + w] |= (uint64_t)1 << k;
        }
}

void pyhvd_agreement_read(pyhvd_ready_table *t, uint32_t set, uint64_t *announced) {
    const pyhvd_host_tree *tree = &t->agreement->tree;
    uint64_t pair[2 * PYHVD_MAX_WORDS];
    size_t row = t->words * sizeof *announced;
    memset(announced, 0, tree->hosts * row);
    if (!pyhvd_ready_table_lock(t, -1)) return;
    read_order(tree->order, set, announced);
    for (uint32_t g = tree->tops; g < tree->hosts; g++) {
        const uint64_t *known = announced + (uint32_t)tree->parents[g] * t->words;
        if (pyhvd_host_tree_is_child(tree, g)) {
            memset(pair, 0, sizeof pair);
            read_order(tree->below[g], set, pair);
            known = pair + t->words;
        }
        memcpy(announced + g * t->words, known, row);
    }
    pyhvd_ready_table_unlock(t, &(pyhvd_ranks){{0}});
}

/* ---- single frames ---- */

void pyhvd_agreement_ring(pyhvd_ready_table *t, uint32_t host, uint32_t local_rank) {
    uint32_t next = pyhvd_host_tree_way(&t->agreement->tree, host);
    if (!pyhvd_ready_table_lock(t, LOCK_NS)) return;
    /* The order's frames leave room for rings. If even that is used, the sleeper looks later. */
    if (free_bytes(&t->agreement->shared->peers[next]) >= sizeof(frame_header) + 2 * sizeof host)
        write_to(t->agreement, next, RING, (uint32_t[]){host, local_rank}, 2 * sizeof host);
    pyhvd_ready_table_unlock(t, &(pyhvd_ranks){{0}});
    pyhvd_agreement_send(t);
}

/* Tell all neighbours but `source`. */
static void tell(pyhvd_ready_table *t, uint32_t source, uint32_t kind, const void *bytes,
                 size_t n) {
    const pyhvd_host_tree *tree = &t->agreement->tree;
    if (!pyhvd_ready_table_lock(t, LOCK_NS)) return;
    for (uint32_t k = 0; k < tree->n; k++)
        if (tree->neighbours[k] != source && has_room(t->agreement, k, k + 1))
            write_to(t->agreement, tree->neighbours[k], kind, bytes, n);
    pyhvd_ready_table_unlock(t, &(pyhvd_ranks){{0}});
    pyhvd_agreement_send(t);
}

/* A note: of a rank that fails, or that a host is lost. */
typedef struct {
    uint32_t host; /* of the rank, or the lost one */
    int32_t error; /* of the connection between finder and lost host; 0: a rank fails */
    uint32_t finder, bytes;
    uint8_t text[PYHVD_NOTE];
} host_note;

#define NOTE_HEAD offsetof(host_note, text)

void pyhvd_agreement_abort(pyhvd_ready_table *t, const uint8_t *note, size_t bytes) {
    uint32_t host = t->agreement->tree.host;
    host_note told = {host, 0, host, (uint32_t)MIN(bytes, PYHVD_NOTE), {0}};
    memcpy(told.text, note, told.bytes);
    tell(t, told.host, NOTE, &told, NOTE_HEAD + told.bytes);
}

static int waits(const pyhvd_peer_host *peer) {
    return atomic_load_explicit(&peer->written, memory_order_acquire) !=
           atomic_load_explicit(&peer->sent, memory_order_acquire);
}

/* Whether another host has not been sent all frames. */
static int owes_frames(const pyhvd_agreement *a) {
    for (uint32_t k = 0; k < a->tree.n; k++)
        if (waits(&a->shared->peers[a->tree.neighbours[k]])) return 1;
    return 0;
}

void pyhvd_agreement_leave(pyhvd_ready_table *t) {
    pyhvd_agreement *a = t->agreement;
    uint32_t before = atomic_fetch_add_explicit(&a->shared->leavers, 1, memory_order_relaxed);
    if (before + 1 != (uint32_t)t->size) return;
    tell(t, a->tree.host, GOODBYE, "", 0);
    /* Nobody here sends later on, and others may need these frames for the last list. */
    int64_t until = pyhvd_after(LOCK_NS);
    while (owes_frames(a) && !pyhvd_agreement_lost(t) && pyhvd_now() < until) {
        pyhvd_nap(LAST_NAP_NS);
        pyhvd_agreement_send(t);
    }
}

/* ---- sending ---- */

/* Send what waits for a host; return whether the connection took all. */
static int drain(pyhvd_peer_host *peer, int fd) {
    uint64_t sent = atomic_load_explicit(&peer->sent, memory_order_relaxed), written;
    while (sent < (written = atomic_load_explicit(&peer->written, memory_order_acquire))) {
        size_t from = sent % PYHVD_OUT_RING;
        size_t n = MIN((size_t)(written - sent), PYHVD_OUT_RING - from);
        ssize_t gone = send(fd, peer->out + from, n, MSG_NOSIGNAL);
        if (gone <= 0) return 0; /* full; or broken, which the receiver finds */
        sent += (uint64_t)gone;
        atomic_store_explicit(&peer->sent, sent, memory_order_release);
    }
    return 1;
}

void pyhvd_agreement_send(const pyhvd_ready_table *t) {
    const pyhvd_agreement *a = t->agreement;
    for (uint32_t k = 0; k < a->tree.n; k++) {
        uint32_t g = a->tree.neighbours[k];
        pyhvd_peer_host *peer = &a->shared->peers[g];
        int took = 1;
        while (took && waits(peer) &&
               !atomic_exchange_explicit(&peer->sending, 1, memory_order_acquire)) {
            took = drain(peer, a->fds[g]);
            atomic_store_explicit(&peer->sending, 0, memory_order_release);
            atomic_thread_fence(memory_order_seq_cst);
        }
    }
}

/* ---- receiving ---- */

/* Let every local rank find out what a note says; return whether it is the first. */
static int keep_note(pyhvd_ready_table *t, const host_note *note) {
    pyhvd_shared_agreement *shared = t->agreement->shared;
    if (atomic_load_explicit(&shared->lost, memory_order_relaxed)) return 0;
    shared->finder = note->finder;
    shared->error = note->error;
    shared->note_bytes = note->bytes;
    memcpy(shared->note, note->text, note->bytes);
    atomic_store_explicit(&shared->lost, note->host + 1, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    for (int q = 0; q < t->size; q++) {
        pyhvd_ready_table_wake_progress(t, q);
        pyhvd_ready_table_wake(t, q, PYHVD_WAKE_LOST);
    }
    return 1;
}

static void take_note(pyhvd_ready_table *t, uint32_t source, const host_note *note) {
    if (keep_note(t, note)) tell(t, source, NOTE, note, NOTE_HEAD + note->bytes);
}

/* A neighbour is lost. */
static void lose(pyhvd_ready_table *t, uint32_t host, int error) {
    host_note note = {host, error, t->agreement->tree.host, 0, {0}};
    take_note(t, host, &note);
}

/* The same under the table's lock, without telling the other hosts. */
static void lose_here(pyhvd_ready_table *t, uint32_t host, int error) {
    host_note note = {host, error, t->agreement->tree.host, 0, {0}};
    keep_note(t, &note);
}

/* Handle a message of an order. */
static void handle_message(pyhvd_ready_table *t, uint32_t source, const uint8_t *bytes, size_t n) {
    pyhvd_host_tree *tree = &t->agreement->tree;
    pyhvd_ranks audience = {{0}};
    if (!pyhvd_ready_table_lock(t, -1)) return; /* this rank's path was closed */
    if (n > sizeof(pyhvd_order_header)) t->agreement->shared->announcer = source;
    int status = pyhvd_host_tree_receive(tree, source, (const uint64_t *)bytes, n);
    t->agreement->relays = pyhvd_host_tree_is_child(tree, source);
    for (uint32_t set = 0; set < PYHVD_MAX_SETS && t->agreement->relays && !status; set++)
        if (t->shared->sets[set].spans) pyhvd_ready_table_match(t, set, 0, t->words, 0, &audience);
    t->agreement->relays = 0;
    if (!status) pyhvd_agreement_carry_on(t, &audience);
    pyhvd_ready_table_unlock(t, &audience);
    /* `unlock` wakes the other ranks only. If this thread makes progress itself, no other wakes up. */
    if (audience.ranks[t->rank / 64] >> (t->rank % 64) & 1)
        pyhvd_ready_table_wake_for_entry(t, t->rank);
    if (status) lose(t, source, EPROTO);
}

static void handle_payload(pyhvd_ready_table *t, uint32_t source, const uint8_t *bytes, size_t n) {
    if (!pyhvd_ready_table_lock(t, -1)) return;
    int kept = pyhvd_payloads_receive(t, source, bytes, n);
    pyhvd_ready_table_unlock(t, &(pyhvd_ranks){{0}});
    if (!kept) lose(t, source, EPROTO);
}

static void handle_ring(pyhvd_ready_table *t, const uint32_t *place) {
    const pyhvd_host_tree *tree = &t->agreement->tree;
    if (place[0] == tree->host && place[1] < (uint32_t)t->size)
        pyhvd_ready_table_wake(t, (int)place[1], PYHVD_WAKE_WORK);
    else if (place[0] != tree->host && place[0] < tree->hosts)
        pyhvd_agreement_ring(t, place[0], place[1]);
}

static void handle(pyhvd_ready_table *t, uint32_t source, uint32_t kind, const uint8_t *bytes,
                   size_t n) {
    uint32_t place[2];
    host_note note;
    if (kind == ORDER) {
        handle_message(t, source, bytes, n);
    } else if (kind == PAYLOAD) {
        handle_payload(t, source, bytes, n);
    } else if (kind == RING && n == sizeof place) {
        memcpy(place, bytes, sizeof place);
        handle_ring(t, place);
    } else if (kind == NOTE && n >= NOTE_HEAD && n <= sizeof note) {
        memcpy(&note, bytes, n);
        note.bytes = (uint32_t)MIN(note.bytes, n - NOTE_HEAD);
        if (MAX(note.host, note.finder) < t->agreement->tree.hosts)
            take_note(t, source, &note);
        else
            lose(t, source, EPROTO);
    } else if (kind == GOODBYE) {
        atomic_store_explicit(&t->agreement->shared->peers[source].left, 1, memory_order_relaxed);
    } else if (kind != BEAT) {
        lose(t, source, EPROTO);
    }
}

/* Handle the complete frames of a host; keep the rest. */
static void handle_frames(pyhvd_ready_table *t, uint32_t host) {
    pyhvd_peer_host *peer = &t->agreement->shared->peers[host];
    uint32_t at = 0;
    while (peer->received - at >= sizeof(frame_header)) {
        frame_header header;
        memcpy(&header, peer->in + at, sizeof header);
        if (header.bytes < sizeof header || header.bytes > PYHVD_FRAME_MAX || header.bytes % 8) {
            lose(t, host, EPROTO);
            break;
        }
        if (peer->received - at < header.bytes) break;
        handle(t, host, header.kind, peer->in + at + sizeof header, header.bytes - sizeof header);
        at += header.bytes;
    }
    peer->received -= at;
    if (at) memmove(peer->in, peer->in + at, peer->received);
}

/* Read from a host; return whether anything came. */
static int read_from(pyhvd_ready_table *t, uint32_t host) {
    pyhvd_peer_host *peer = &t->agreement->shared->peers[host];
    int any = 0;
    for (int k = 0; k < READS && !pyhvd_agreement_lost(t); k++) {
        ssize_t got = recv(t->agreement->fds[host], peer->in + peer->received,
                           PYHVD_FRAME_MAX - peer->received, 0);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) break;
        if (got <= 0) {
            if (atomic_load_explicit(&peer->left, memory_order_relaxed)) break;
            lose(t, host, got ? errno : PYHVD_CLOSED_BY_PEER);
            return 1;
        }
        any = 1;
        atomic_store_explicit(&peer->heard_ns, pyhvd_now(), memory_order_relaxed);
        pyhvd_add(&peer->counters.received, (uint64_t)got);
        int was_all = (uint32_t)got < PYHVD_FRAME_MAX - peer->received;
        peer->received += (uint32_t)got;
        handle_frames(t, host);
        if (was_all) break;
    }
    return any;
}

int pyhvd_agreement_receive(pyhvd_ready_table *t) {
    const pyhvd_agreement *a = t->agreement;
    int any = 0;
    if (atomic_load_explicit(&a->shared->receiving, memory_order_relaxed) ||
        atomic_exchange_explicit(&a->shared->receiving, 1, memory_order_acquire))
        return 0;
    for (uint32_t k = 0; k < a->tree.n; k++) any |= read_from(t, a->tree.neighbours[k]);
    atomic_store_explicit(&a->shared->receiving, 0, memory_order_release);
    pyhvd_agreement_send(t); /* a frame may have made this host owe one */
    pyhvd_ready_table_retry(t);
    return any;
}

/* Sleep until `bell` rings, `other` (-1: none) is readable, a frame arrives if `frames`, or `ns` have
 * passed. Return whether `other` is readable. */
static int sleep_on(const pyhvd_ready_table *t, int bell, int other, int frames, int64_t ns) {
    const pyhvd_agreement *a = t->agreement;
    struct pollfd polls[PYHVD_MAX_HOSTS + 2] = {{.fd = bell, .events = POLLIN},
                                                {.fd = other, .events = POLLIN}};
    nfds_t n = 2;
    for (uint32_t k = 0; frames && k < a->tree.n; k++) {
        uint32_t g = a->tree.neighbours[k];
        const pyhvd_peer_host *peer = &a->shared->peers[g];
        if (atomic_load_explicit(&peer->left, memory_order_relaxed)) continue;
        short events = waits(peer) ? POLLIN | POLLOUT : POLLIN;
        polls[n++] = (struct pollfd){.fd = a->fds[g], .events = events};
    }
    pyhvd_poll(polls, n, ns);
    if (polls[0].revents) pyhvd_empty_bell(bell);
    return polls[1].revents != 0;
}

void pyhvd_agreement_poll(const pyhvd_ready_table *t, int bell, int64_t ns) {
    sleep_on(t, bell, -1, 1, ns);
}

int pyhvd_agreement_rest(const pyhvd_ready_table *t, int attended, int64_t ns) {
    const pyhvd_agreement *a = t->agreement;
    return sleep_on(t, a->background_bells[t->rank], a->messages, !attended, ns);
}

int pyhvd_agreement_await_lost(pyhvd_ready_table *t, int64_t ns) {
    int64_t until = pyhvd_after(ns), left;
    while (!pyhvd_agreement_lost(t) && (left = until - pyhvd_now()) > 0)
        if (!pyhvd_agreement_receive(t))
            pyhvd_agreement_poll(t, t->agreement->progress_bells[t->rank], MIN(left, LOOK_NS));
    return pyhvd_agreement_lost(t) != 0;
}

/* ---- beats ---- */

/* For how long (ns) nothing has come from the most silent host that has not left. */
static int64_t longest_silence(const pyhvd_ready_table *t, int64_t now, uint32_t *host) {
    const pyhvd_agreement *a = t->agreement;
    int64_t longest = 0;
    for (uint32_t k = 0; k < a->tree.n; k++) {
        uint32_t g = a->tree.neighbours[k];
        const pyhvd_peer_host *peer = &a->shared->peers[g];
        int64_t heard = atomic_load_explicit(&peer->heard_ns, memory_order_relaxed);
        if (atomic_load_explicit(&peer->left, memory_order_relaxed)) continue;
        if (!heard || now - heard <= longest) continue; /* 0: it has not begun */
        longest = now - heard;
        *host = g;
    }
    return longest;
}

/* Whether a thread of this host sleeps on the connections: it receives each beat at once. */
static int is_listening(const pyhvd_ready_table *t) {
    for (int q = 0; q < t->size; q++) {
        const pyhvd_rank_state *state = &t->shared->rank_states[q];
        if (atomic_load_explicit(&state->progress_asleep, memory_order_relaxed) == PYHVD_POLLS ||
            atomic_load_explicit(&state->background_asleep, memory_order_relaxed) == PYHVD_POLLS)
            return 1;
    }
    return 0;
}

/* Whether more than beats has come since the last call. */
static int is_busy(pyhvd_agreement *a) {
    uint64_t received = 0;
    for (uint32_t k = 0; k < a->tree.n; k++)
        received += atomic_load_explicit(&a->shared->peers[a->tree.neighbours[k]].counters.received,
                                         memory_order_relaxed);
    uint64_t news = received - a->looked_at;
    a->looked_at = received;
    return news > 2 * a->tree.n * sizeof(frame_header);
}

/* Send a beat, unless another rank of this host has; look for silent hosts. Return after how long
 * (ns) to look again. */
static int64_t beat(pyhvd_ready_table *t) {
    pyhvd_shared_agreement *shared = t->agreement->shared;
    int64_t now = pyhvd_now(), last = atomic_load_explicit(&shared->beat_ns, memory_order_relaxed);
    uint32_t host = 0;
    if (now - last > PYHVD_BEAT_NS - PYHVD_BEAT_LOOK_NS / 2 &&
        atomic_compare_exchange_strong_explicit(&shared->beat_ns, &last, now, memory_order_relaxed,
                                                memory_order_relaxed))
        tell(t, t->agreement->tree.host, BEAT, "", 0);
    if (is_listening(t) && longest_silence(t, now, &host) < PYHVD_BEAT_NS + PYHVD_BEAT_LOOK_NS)
        return is_busy(t->agreement) ? PYHVD_BEAT_NS / 2 : PYHVD_BEAT_NS;
    pyhvd_agreement_receive(t);
    int64_t left = PYHVD_SILENT_NS - longest_silence(t, now, &host);
    if (left < 0) lose(t, host, ETIMEDOUT);
    return left < 0 ? PYHVD_BEAT_LOOK_NS : MIN(left + 1, PYHVD_BEAT_LOOK_NS);
}

static void *beat_on(void *table) {
    pyhvd_ready_table *t = table;
    pyhvd_agreement *a = t->agreement;
    pthread_mutex_lock(&a->mutex);
    while (a->beating) {
        pthread_mutex_unlock(&a->mutex);
        int64_t at = pyhvd_after(beat(t));
        pthread_mutex_lock(&a->mutex);
        while (a->beating && !pyhvd_cond_wait_until(&a->ended, &a->mutex, at)) {
        }
    }
    pthread_mutex_unlock(&a->mutex);
    return NULL;
}

int pyhvd_agreement_start_beats(pyhvd_ready_table *t) {
    pyhvd_agreement *a = t->agreement;
    pyhvd_cond_init(&a->ended);
    pthread_mutex_init(&a->mutex, NULL);
    a->beating = 1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's threads */
    if (pthread_create(&a->beats, NULL, beat_on, t)) a->beating = 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return a->beating;
}

void pyhvd_agreement_stop_beats(pyhvd_ready_table *t) {
    pyhvd_agreement *a = t->agreement;
    if (!a->beating) return;
    pthread_mutex_lock(&a->mutex);
    a->beating = 0;
    pthread_cond_signal(&a->ended);
    pthread_mutex_unlock(&a->mutex);
    pthread_join(a->beats, NULL);
}
