/* The tree of hosts: how many hosts agree on one log, with few messages from each of them.
 *
 * Some hosts are *tops*; every other host has one *parent*, which may have a parent itself. The tops
 * run the order across hosts (host_order.h) among themselves. A parent and each of its children run
 * the same order once more, as hosts 0 and 1 of two. So every host has one order above it, and one
 * below it for each child. If all hosts are tops, there is nothing but their order.
 *
 *   up     once a host's ranks have marked a slot and each child has announced it below, the host
 *          announces the slot above
 *   down   each entry of the log above the host announces in every order below: the child's log
 *
 * As the order, a pure state machine, called under the lock of the host's ready table.
 *
 * Invariants
 *   1. An announcement above says that the host and all hosts below it have marked the slot. It stays
 *      true until the slot is decided or recalled: so does each child's announcement.
 *   2. Below, a parent announces only entries of its log, each in a message of its own: slots that
 *      the child has announced, or a list. Each gets a higher stamp than the one before. So the
 *      child's log has the same entries in the same order.
 *   3. An announcement of a child counts only while the parent has not announced the slot below, and
 *      has taken all lists from the order below. The parent announces a list below at once after it
 *      has taken it above. So an announcement that counts is not older than any recall in the
 *      parent's log.
 *   4. A parent takes an entry only if the rings of all orders below have room for any list. A child
 *      makes room as every host does (host_order.h, invariant 11).
 *   5. A digest that a host announces above is what the digests of its ranks and of its children make
 *      together. Below, a parent announces the child's own digest if the slot's digests are alike on all
 *      hosts, and PYHVD_ORDER_UNLIKE if they are not. So the child's log says the same as the parent's.
 *   6. A parent owes nothing below: its own message completes a slot or is a list, so its count is at
 *      the time of every entry.
 *
 * Delays. An announcement of a host passes its parents to a top, all tops, and the hosts below them:
 * with one level below the tops, three connections at most.
 */
#ifndef PYHVD_HOST_TREE_H
#define PYHVD_HOST_TREE_H

#include "agreement/host_order.h"

/* One rank's view; the ranks of a host share the orders. */
typedef struct {
    uint32_t host, hosts, tops;
    int32_t parents[PYHVD_MAX_HOSTS]; /* -1 for the tops, which are the first hosts */
    /* Hosts: `above` of them above this one, then its children. */
    uint32_t n, above, neighbours[PYHVD_MAX_HOSTS];
    pyhvd_host_order *order;                  /* with the hosts above */
    pyhvd_host_order *below[PYHVD_MAX_HOSTS]; /* by child */
} pyhvd_host_tree;

/* Find this host's neighbours. A parent has a lower number than its children. Return 0, or
 * PYHVD_ORDER_INVALID. */
int pyhvd_host_tree_init(pyhvd_host_tree *tree, uint32_t host, uint32_t hosts,
                         const int32_t *parents);

/* View this host's orders, of that many bytes together, at `base`; begin, on one rank, before any
 * rank uses them. */
size_t pyhvd_host_tree_bytes(const pyhvd_host_tree *tree, uint32_t sets, uint32_t slots);
void pyhvd_host_tree_attach(pyhvd_host_tree *tree, void *base, uint32_t sets, uint32_t slots);
void pyhvd_host_tree_clear(pyhvd_host_tree *tree, uint32_t sets, uint32_t slots);

/* As pyhvd_host_order_announce, for the hosts above: announce the slots of a range (or NULL) that all
 * children have announced. */
int64_t pyhvd_host_tree_announce(pyhvd_host_tree *tree, const pyhvd_slot_range *range,
                                 const pyhvd_order_list *list, uint64_t *out, size_t room);

/* Take the next message of a neighbour. After one of a child, more slots may be complete. */
int pyhvd_host_tree_receive(pyhvd_host_tree *tree, uint32_t source, const uint64_t *message,
                            size_t bytes);

/* Take the next entry of the log, and then write for each child the message that passes it on. Return
 * 0 if there is none, or a child has no room for it; the message's bytes. */
int pyhvd_host_tree_take(pyhvd_host_tree *tree, pyhvd_order_entry *entry);
int64_t pyhvd_host_tree_pass(pyhvd_host_tree *tree, uint32_t child, const pyhvd_order_entry *entry,
                             uint64_t *out, size_t room);

/* Return the neighbour on the way to another host. */
uint32_t pyhvd_host_tree_way(const pyhvd_host_tree *tree, uint32_t to);

static inline int pyhvd_host_tree_is_child(const pyhvd_host_tree *tree, uint32_t host) {
    return tree->parents[host] == (int32_t)tree->host;
}

#endif
