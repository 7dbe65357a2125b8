/* Payloads of the agreement between hosts; payloads.h states the invariants. */
#include "agreement/payloads.h"

#include <string.h>

#include "agreement/agreement.h"
#include "kernels/kernels.h"

static pyhvd_payloads *payloads_of(const pyhvd_ready_table *t) {
    return &t->agreement->shared->payloads;
}

static int has_payloads(const pyhvd_ready_table *t) {
    const pyhvd_host_tree *tree = &t->agreement->tree;
    return tree->tops == tree->hosts && tree->hosts <= PYHVD_PAYLOAD_HOSTS;
}

static pyhvd_payload *staged_by(const pyhvd_ready_table *t, uint32_t rank) {
    return &t->shared->rank_states[rank].staged;
}

static size_t bytes_of(const pyhvd_payload_item *item) {
    return item->count * pyhvd_itemsize(item->dtype);
}

static pyhvd_payload_item *find(pyhvd_payload *payload, uint32_t set, uint32_t slot) {
    for (uint32_t k = 0; k < payload->n; k++)
        if (payload->items[k].slot == slot && payload->items[k].set == set)
            return &payload->items[k];
    return NULL;
}

/* The round of a slot, in which it is announced, or will be. */
static uint64_t round_of(const pyhvd_ready_table *t, uint32_t set, uint32_t slot) {
    const pyhvd_host_order *o = t->agreement->tree.order;
    return pyhvd_order_group_at(o, set, slot / 64)->current[slot % 64].round;
}

static int is_alike(const pyhvd_payload_item *a, const pyhvd_payload_item *b) {
    return (a->count == b->count || a->op == PYHVD_GATHERS) && a->dtype == b->dtype &&
           a->op == b->op && a->postscale == b->postscale;
}

/* Combine the items of local ranks, or of hosts, which have a payload each: reduce their values, or
 * store them one behind the other. */
static void combine(uint8_t *out, const pyhvd_payload_item *const *items, const int64_t *values,
                    uint32_t n, double postscale) {
    const pyhvd_payload_item *first = items[0];
    if (first->op != PYHVD_GATHERS) {
        pyhvd_reduce(out, values, n, first->count, first->dtype, first->op, postscale);
        return;
    }
    for (uint32_t k = 0; k < n; out += bytes_of(items[k++]))
        memcpy(out, (const void *)(intptr_t)values[k], bytes_of(items[k]));
}

/* The bytes of what `combine` stores. */
static size_t combined_bytes(const pyhvd_payload_item *const *items, uint32_t n) {
    size_t bytes = 0;
    // cppcheck-suppress uninitvar - the first n items are set
    if (items[0]->op != PYHVD_GATHERS) return bytes_of(items[0]);
    for (uint32_t k = 0; k < n; k++) bytes += bytes_of(items[k]);
    return bytes;
}

/* ---- staging ---- */

void pyhvd_payloads_tidy(pyhvd_ready_table *t) {
    pyhvd_rank_state *mine = &t->shared->rank_states[t->rank];
    pyhvd_payload *staged = &mine->staged;
    uint32_t n = staged->n;
    staged->n = staged->bytes = 0;
    for (uint32_t k = 0; k < n; k++) {
        pyhvd_payload_item item = staged->items[k];
        size_t at = pyhvd_words_of_rank(t, (uint32_t)t->rank, item.set) + item.slot / 64;
        if (!(t->ready[at].bits >> (item.slot % 64) & 1)) continue;
        memmove(staged->values + staged->bytes, staged->values + item.at, bytes_of(&item));
        item.at = (uint16_t)staged->bytes;
        staged->bytes += (uint32_t)bytes_of(&item);
        staged->items[staged->n++] = item;
    }
}

uint8_t *pyhvd_payloads_stage(const pyhvd_ready_table *t, pyhvd_payload_item item) {
    pyhvd_payload *staged = staged_by(t, (uint32_t)t->rank);
    if (!has_payloads(t) || !t->shared->sets[item.set].spans || staged->n == PYHVD_PAYLOAD_SLOTS ||
        bytes_of(&item) > PYHVD_PAYLOAD - staged->bytes)
        return NULL;
    item.at = (uint16_t)staged->bytes;
    staged->bytes += (uint32_t)bytes_of(&item);
    staged->items[staged->n++] = item;
    return staged->values + item.at;
}

/* ---- sending ---- */

/* Return a box of this host's that no host needs any more, or -1. */
static int find_free_box(const pyhvd_ready_table *t) {
    const pyhvd_agreement *a = t->agreement;
    uint64_t taken = UINT64_MAX;
    for (uint32_t g = 0; g < a->tree.hosts; g++)
        if (a->tree.order->entries[g] < taken) taken = a->tree.order->entries[g];
    for (int box = 0; box < PYHVD_BOXES; box++)
        if (!(payloads_of(t)->used[a->tree.host] >> box & 1) && payloads_of(t)->freed[box] <= taken)
            return box;
    return -1;
}

/* Add this host's partial result of a slot; return 0 if a member has not staged it. */
static int add_partial(const pyhvd_ready_table *t, pyhvd_payload *payload, uint32_t set,
                       uint32_t slot) {
    const pyhvd_table_set *s = &t->shared->sets[set];
    const pyhvd_payload_item *items[PYHVD_MAX_LOCAL];
    int64_t parts[PYHVD_MAX_LOCAL];
    if (!s->count || payload->n == PYHVD_PAYLOAD_SLOTS) return 0;
    for (uint32_t k = 0; k < s->count; k++) {
        pyhvd_payload *staged = staged_by(t, s->ranks[k]);
        items[k] = find(staged, set, slot);
        if (!items[k] || !is_alike(items[0], items[k])) return 0;
        parts[k] = (int64_t)(intptr_t)(staged->values + items[k]->at);
    }
    size_t bytes = combined_bytes(items, s->count);
    if (bytes > PYHVD_PAYLOAD - payload->bytes) return 0;
    pyhvd_payload_item *item = &payload->items[payload->n++];
    *item = *items[0];
    item->at = (uint16_t)payload->bytes;
    item->count = (uint32_t)(bytes / pyhvd_itemsize(item->dtype));
    item->round = round_of(t, set, slot);
    payload->bytes += (uint32_t)bytes;
    if (s->count == 1)
        memcpy(payload->values + item->at, (const void *)(intptr_t)parts[0], bytes);
    else
        combine(payload->values + item->at, items, parts, s->count, 1.0);
    return 1;
}

size_t pyhvd_payloads_collect(pyhvd_ready_table *t, uint32_t set, uint32_t first, uint32_t end,
                              const uint64_t *words, uint8_t *out) {
    const pyhvd_host_order *o = t->agreement->tree.order;
    uint32_t slots = 0;
    if (!has_payloads(t)) return 0;
    for (uint32_t w = first; w < end && slots <= PYHVD_PAYLOAD_SLOTS; w++)
        slots += (uint32_t)__builtin_popcountll(words[w - first] &
                                                ~pyhvd_order_group_at(o, set, w)->announced);
    int box = slots && slots <= PYHVD_PAYLOAD_SLOTS ? find_free_box(t) : -1;
    if (box < 0) return 0;
    pyhvd_payload *payload = &payloads_of(t)->boxes[t->agreement->tree.host][box];
    payload->n = payload->bytes = 0;
    for (uint32_t w = first; w < end; w++) {
        uint64_t left = words[w - first] & ~pyhvd_order_group_at(o, set, w)->announced;
        for (; left; left &= left - 1)
            if (!add_partial(t, payload, set, w * 64 + (uint32_t)__builtin_ctzll(left))) return 0;
    }
    payloads_of(t)->used[t->agreement->tree.host] |= 1u << box;
    pyhvd_payload_head head = {(uint32_t)box, payload->n, payload->bytes, 0};
    size_t items = payload->n * sizeof *payload->items;
    memcpy(out, &head, sizeof head);
    memcpy(out + sizeof head, payload->items, items);
    memcpy(out + sizeof head + items, payload->values, payload->bytes);
    return sizeof head + items + payload->bytes;
}

/* Whether an entry that was just taken (NULL: none), or an earlier one, has ended an item's round. A
 * round with as many recalls, and the other parity, is over if the entry decides the slot. Otherwise
 * the item's host is ahead by one decision. */
static int is_over(const pyhvd_ready_table *t, const pyhvd_payload_item *item,
                   const pyhvd_order_entry *entry) {
    uint64_t now = round_of(t, item->set, item->slot);
    uint32_t w = item->slot / 64;
    if (now >> 1 != item->round >> 1) return now > item->round;
    return now != item->round && entry && entry->kind == PYHVD_BATCH && entry->set == item->set &&
           w >= entry->first && w < entry->end &&
           (entry->words[w - entry->first] >> (item->slot % 64) & 1);
}

static void settle_box(pyhvd_ready_table *t, uint32_t host, uint32_t box,
                       const pyhvd_order_entry *entry) {
    const pyhvd_agreement *a = t->agreement;
    pyhvd_payload *payload = &payloads_of(t)->boxes[host][box];
    uint32_t n = payload->n;
    payload->n = 0;
    for (uint32_t k = 0; k < n; k++)
        if (!is_over(t, &payload->items[k], entry))
            payload->items[payload->n++] = payload->items[k];
    if (payload->n) return;
    payloads_of(t)->used[host] &= ~(1u << box);
    if (host == a->tree.host) payloads_of(t)->freed[box] = a->tree.order->entries[host];
}

void pyhvd_payloads_settle(pyhvd_ready_table *t, const pyhvd_order_entry *entry) {
    if (!has_payloads(t)) return;
    for (uint32_t g = 0; g < t->agreement->tree.hosts; g++)
        for (uint32_t left = payloads_of(t)->used[g]; left; left &= left - 1)
            settle_box(t, g, (uint32_t)__builtin_ctz(left), entry);
}

/* ---- receiving ---- */

static int is_valid(const pyhvd_ready_table *t, const pyhvd_payload_item *item, size_t bytes) {
    return item->set < PYHVD_MAX_SETS && item->slot < t->slots && item->dtype < PYHVD_DTYPES &&
           (item->op < PYHVD_OPS || item->op == PYHVD_GATHERS) && item->at <= bytes &&
           item->count <= bytes && bytes_of(item) <= bytes - item->at;
}

int pyhvd_payloads_receive(pyhvd_ready_table *t, uint32_t host, const uint8_t *frame,
                           size_t bytes) {
    pyhvd_payload_head head;
    if (bytes < sizeof head || !has_payloads(t)) return 0;
    memcpy(&head, frame, sizeof head);
    if (head.box >= PYHVD_BOXES || head.n > PYHVD_PAYLOAD_SLOTS || head.bytes > PYHVD_PAYLOAD)
        return 0;
    pyhvd_payload *payload = &payloads_of(t)->boxes[host][head.box];
    size_t items = head.n * sizeof *payload->items;
    if (bytes < sizeof head + items + head.bytes || payloads_of(t)->used[host] >> head.box & 1)
        return 0;
    memcpy(payload->items, frame + sizeof head, items);
    for (uint32_t k = 0; k < head.n; k++)
        if (!is_valid(t, &payload->items[k], head.bytes)) return 0;
    memcpy(payload->values, frame + sizeof head + items, head.bytes);
    payload->n = head.n;
    payload->bytes = head.bytes;
    payloads_of(t)->used[host] |= 1u << head.box;
    settle_box(t, host, head.box, NULL); /* a recall may have come before it in the log */
    return 1;
}

/* ---- results ---- */

/* The item of a slot that a host has sent in a round, with the address of its values; or NULL. */
static const pyhvd_payload_item *sent_by(const pyhvd_ready_table *t, uint32_t host, uint32_t set,
                                         uint32_t slot, uint64_t round, int64_t *values) {
    for (uint32_t used = payloads_of(t)->used[host]; used; used &= used - 1) {
        pyhvd_payload *payload = &payloads_of(t)->boxes[host][__builtin_ctz(used)];
        const pyhvd_payload_item *item = find(payload, set, slot);
        if (!item || item->round != round) continue;
        *values = (int64_t)(intptr_t)(payload->values + item->at);
        return item;
    }
    return NULL;
}

/* Store the result of a slot at byte `at` of the results, and step behind it. Return 1; or 0 if a host has
 * sent no payload, or -g if host g's differs from host 0's. */
static int reduce_slot(const pyhvd_ready_table *t, uint32_t set, uint32_t slot, uint8_t *results,
                       size_t *at) {
    const pyhvd_payload_item *items[PYHVD_PAYLOAD_HOSTS] = {NULL};
    int64_t parts[PYHVD_PAYLOAD_HOSTS];
    uint32_t hosts = t->agreement->tree.hosts;
    uint64_t round = round_of(t, set, slot) ^ 1; /* the decision has begun the next one */
    for (uint32_t g = 0; g < hosts; g++) {
        items[g] = sent_by(t, g, set, slot, round, &parts[g]);
        if (!items[g]) return 0;
        if (!is_alike(items[0], items[g])) return -(int)g;
    }
    size_t bytes = pyhvd_payload_room(combined_bytes(items, hosts));
    if (bytes > sizeof payloads_of(t)->results->values - *at) return 0;
    combine(results + *at, items, parts, hosts, items[0]->postscale);
    *at += bytes;
    return 1;
}

int pyhvd_payloads_reduce(pyhvd_ready_table *t, const pyhvd_order_entry *decided) {
    uint32_t slots = 0;
    if (!has_payloads(t)) return 0;
    for (uint32_t w = decided->first; w < decided->end; w++)
        slots += (uint32_t)__builtin_popcountll(decided->words[w - decided->first]);
    if (slots > PYHVD_PAYLOAD_SLOTS) return 0;
    uint64_t tail = atomic_load_explicit(&t->shared->tail, memory_order_relaxed);
    uint8_t *results = payloads_of(t)->results[tail % PYHVD_LOG_ENTRIES].values;
    size_t at = 0;
    for (uint32_t w = decided->first; w < decided->end; w++)
        for (uint64_t left = decided->words[w - decided->first]; left; left &= left - 1) {
            uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(left);
            int reduced = reduce_slot(t, decided->set, slot, results, &at);
            if (reduced <= 0) return reduced;
        }
    return 1;
}

const uint8_t *pyhvd_payloads_results(const pyhvd_ready_table *t, uint64_t position) {
    return payloads_of(t)->results[position % PYHVD_LOG_ENTRIES].values;
}
