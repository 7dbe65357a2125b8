/* The tree of hosts; host_tree.h states the invariants. */
#include "agreement/host_tree.h"

/* ---- set-up ---- */

int pyhvd_host_tree_init(pyhvd_host_tree *tree, uint32_t host, uint32_t hosts,
                         const int32_t *parents) {
    if (hosts > PYHVD_MAX_HOSTS || host >= hosts) return PYHVD_ORDER_INVALID;
    *tree = (pyhvd_host_tree){.host = host, .hosts = hosts};
    for (uint32_t g = 0; g < hosts; g++) {
        if (parents[g] < -1 || parents[g] >= (int32_t)g || (parents[g] < 0 && tree->tops != g))
            return PYHVD_ORDER_INVALID;
        tree->parents[g] = parents[g];
        tree->tops += parents[g] < 0;
    }
    if (host >= tree->tops) tree->neighbours[tree->n++] = (uint32_t)parents[host];
    for (uint32_t k = 1; k < tree->tops && host < tree->tops; k++)
        tree->neighbours[tree->n++] = (host + k) % tree->tops;
    tree->above = tree->n;
    for (uint32_t g = tree->tops; g < hosts; g++)
        if (pyhvd_host_tree_is_child(tree, g)) tree->neighbours[tree->n++] = g;
    return 0;
}

size_t pyhvd_host_tree_bytes(const pyhvd_host_tree *tree, uint32_t sets, uint32_t slots) {
    return (1 + tree->n - tree->above) * pyhvd_host_order_bytes(sets, slots);
}

void pyhvd_host_tree_attach(pyhvd_host_tree *tree, void *base, uint32_t sets, uint32_t slots) {
    uint8_t *at = base;
    tree->order = base;
    for (uint32_t k = tree->above; k < tree->n; k++)
        tree->below[tree->neighbours[k]] =
            (pyhvd_host_order *)(at += pyhvd_host_order_bytes(sets, slots));
}

void pyhvd_host_tree_clear(pyhvd_host_tree *tree, uint32_t sets, uint32_t slots) {
    int is_top = tree->host < tree->tops;
    pyhvd_host_order_init(tree->order, is_top ? tree->host : 1, is_top ? tree->tops : 2, sets,
                          slots);
    for (uint32_t k = tree->above; k < tree->n; k++)
        pyhvd_host_order_init(tree->below[tree->neighbours[k]], 0, 2, sets, slots);
}

/* ---- up ---- */

/* Return which slots of a word a child's announcement counts for; see invariant 3. */
static uint64_t offered(const pyhvd_host_order *o, uint32_t set, uint32_t word, uint64_t slots) {
    if (o->taken[0] != o->tail) return 0;
    const pyhvd_order_group *g = pyhvd_order_group_at(o, set, word);
    for (uint64_t rest = slots; rest; rest &= rest - 1)
        if (g->current[__builtin_ctzll(rest)].hosts != 2) slots ^= rest & -rest;
    return slots;
}

/* Store what the digests of a range and those of all children make together, of the slots of the set's
 * last word. */
static void compare(const pyhvd_host_tree *tree, const pyhvd_slot_range *range, uint64_t *digests) {
    uint32_t last = range->end - 1;
    for (uint64_t left = range->words[last - range->first]; left; left &= left - 1) {
        uint32_t slot = (uint32_t)__builtin_ctzll(left);
        digests[slot] = range->digests[slot];
        for (uint32_t k = tree->above; k < tree->n; k++) {
            const pyhvd_host_order *o = tree->below[tree->neighbours[k]];
            digests[slot] = pyhvd_order_compare(
                digests[slot], pyhvd_order_group_at(o, range->set, last)->current[slot].digest);
        }
    }
}

int64_t pyhvd_host_tree_announce(pyhvd_host_tree *tree, const pyhvd_slot_range *range,
                                 const pyhvd_order_list *list, uint64_t *out, size_t room) {
    uint64_t words[PYHVD_RANGE_WORDS], digests[64];
    if (!range || tree->n == tree->above)
        return pyhvd_host_order_announce(tree->order, range, range != NULL, list, out, room);
    for (uint32_t w = range->first; w < range->end; w++) {
        uint64_t slots = range->words[w - range->first];
        slots &= ~pyhvd_order_group_at(tree->order, range->set, w)->announced;
        for (uint32_t k = tree->above; k < tree->n && slots; k++)
            slots = offered(tree->below[tree->neighbours[k]], range->set, w, slots);
        words[w - range->first] = slots;
    }
    pyhvd_slot_range complete = *range;
    complete.words = words;
    if (range->digests && range->end == tree->order->words) {
        compare(tree, range, digests);
        complete.digests = digests;
    }
    return pyhvd_host_order_announce(tree->order, &complete, 1, list, out, room);
}

int pyhvd_host_tree_receive(pyhvd_host_tree *tree, uint32_t source, const uint64_t *message,
                            size_t bytes) {
    pyhvd_order_entry passed;
    if (!pyhvd_host_tree_is_child(tree, source))
        return pyhvd_host_order_receive(tree->order, tree->host < tree->tops ? source : 0, message,
                                        bytes);
    int status = pyhvd_host_order_receive(tree->below[source], 1, message, bytes);
    while (!status && pyhvd_host_order_take(tree->below[source], &passed)) {
    }
    return status;
}

/* ---- down ---- */

int pyhvd_host_tree_take(pyhvd_host_tree *tree, pyhvd_order_entry *entry) {
    for (uint32_t k = tree->above; k < tree->n; k++)
        if (!pyhvd_host_order_has_room(tree->below[tree->neighbours[k]])) return 0;
    return pyhvd_host_order_take(tree->order, entry);
}

int64_t pyhvd_host_tree_pass(pyhvd_host_tree *tree, uint32_t child, const pyhvd_order_entry *entry,
                             uint64_t *out, size_t room) {
    pyhvd_host_order *o = tree->below[child];
    pyhvd_order_entry rest = *entry, passed;
    pyhvd_slot_range ranges[PYHVD_ORDER_RANGES];
    pyhvd_order_list list = {entry->number, entry->audience, entry->audience_bytes, 0, ranges};
    uint64_t digests[64];
    int is_list = entry->kind == PYHVD_LIST;
    for (uint32_t k = 0; k < 64 && !is_list && entry->end == o->words; k++) {
        uint64_t own = pyhvd_order_group_at(o, entry->set, o->words - 1)->current[k].digest;
        digests[k] = entry->unlike >> k & 1 ? PYHVD_ORDER_UNLIKE : own;
    }
    if (is_list)
        while (pyhvd_host_order_next_range(tree->order, &rest, &ranges[list.n])) list.n++;
    else
        ranges[0] = (pyhvd_slot_range){
            PYHVD_ANNOUNCED, entry->set, entry->first, entry->end, entry->words, NULL, 0, digests};
    int64_t written = pyhvd_host_order_announce(o, ranges, !is_list, is_list ? &list : NULL, out,
                                                room);
    while (pyhvd_host_order_take(o, &passed)) {
    }
    return written;
}

/* ---- ways ---- */

uint32_t pyhvd_host_tree_way(const pyhvd_host_tree *tree, uint32_t to) {
    while (to >= tree->tops && !pyhvd_host_tree_is_child(tree, to))
        to = (uint32_t)tree->parents[to];
    int is_near = to >= tree->tops || tree->host < tree->tops;
    return is_near ? to : (uint32_t)tree->parents[tree->host];
}
