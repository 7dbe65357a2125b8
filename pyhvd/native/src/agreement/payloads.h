/* Payloads: the values of a few small tensors, which travel with the agreement between hosts.
 *
 * The values of a reduction are a rank's elements; a host sends the partial result of its ranks. The values
 * of a move (op PYHVD_GATHERS) are the bytes of a rank's lane; a host sends its ranks' lanes, one behind
 * the other, and the result has the lanes of all hosts.
 *
 * A rank that marks slots of small tensors *stages* their values: it copies them, scaled, into its
 * rank state. When its host announces slots that all local members have staged, the host sends its
 * partial results in a frame before the announcement. When the order decides a batch whose slots are
 * in payloads of all hosts, whoever appends the batch to the ready log also stores the *results*. The
 * ranks copy them out, so the batch needs no exchange.
 *
 * Invariants
 *   1. All functions are called under the lock of the ready table. Results are also read without it,
 *      as the log's entries are (ready_table.h, 2 and 3): a result lies beside its entry.
 *   2. Whether a batch has results depends on messages alone: an item of a payload names the round of
 *      its slot, and a host announces a slot once in a round. So all hosts decide alike. Rounds
 *      repeat: an item is dropped when its round is over, with the entry that ends it.
 *   3. Each host has PYHVD_BOXES boxes for its own payloads, and as many for those of each other
 *      host. A host uses a box again when its slots were decided or recalled, and all hosts have
 *      told that they have taken that entry of the log. So no box that is needed is overwritten.
 *   4. The sums are those of a flat operation (across.c): the members of a host in their order, then
 *      the hosts' partial results in theirs. So the bits do not depend on the way.
 *   5. A rank drops what it has staged as soon as it finds the slot's mark cleared, and before it marks
 *      slots again.
 */
#ifndef PYHVD_PAYLOADS_H
#define PYHVD_PAYLOADS_H

#include "agreement/host_order.h"

#define PYHVD_PAYLOAD_HOSTS 8 /* with more hosts, or in a tree, there are no payloads */
#define PYHVD_BOXES 4
#define PYHVD_PAYLOAD_ALIGNMENT 16
#define PYHVD_GATHERS 0xffff /* instead of an op of a reduction */

typedef struct {
    pyhvd_payload boxes[PYHVD_PAYLOAD_HOSTS][PYHVD_BOXES]; /* by host */
    uint32_t used[PYHVD_PAYLOAD_HOSTS]; /* by host: bits of the boxes with items */
    uint64_t freed[PYHVD_BOXES];        /* own boxes: entries that every host must have taken */
    struct {
        _Alignas(PYHVD_PAYLOAD_ALIGNMENT)
            uint8_t values[PYHVD_PAYLOAD + PYHVD_PAYLOAD_SLOTS * PYHVD_PAYLOAD_ALIGNMENT];
    } results[PYHVD_LOG_ENTRIES]; /* by position in the log */
} pyhvd_payloads;

/* The frame of a payload: this head, its items, its values. */
typedef struct {
    uint32_t box, n, bytes, unused;
} pyhvd_payload_head;

/* Drop what this rank has staged and no longer marks; before it marks slots. */
void pyhvd_payloads_tidy(pyhvd_ready_table *t);

/* Stage a tensor of a slot that this rank marks: return where its values go, or NULL if there is no room.
 * `item` has all but `at` and `round`. */
uint8_t *pyhvd_payloads_stage(const pyhvd_ready_table *t, pyhvd_payload_item item);

/* Collect the values of the slots in words [first, end) that this host is about to announce, and
 * write the frame to `out`, with room for a head, all items and all values. Return its bytes, or 0 if the
 * announcement goes without a payload. */
size_t pyhvd_payloads_collect(pyhvd_ready_table *t, uint32_t set, uint32_t first, uint32_t end,
                              const uint64_t *words, uint8_t *out);

/* Keep the payload that another host has sent; return 0 if it is malformed. */
int pyhvd_payloads_receive(pyhvd_ready_table *t, uint32_t host, const uint8_t *frame, size_t bytes);

/* Store the results of a batch that the order has decided, for the log's next position. Return 1; or
 * 0 if a host has sent no payload, or -g if host g's differs in kind from host 0's. */
int pyhvd_payloads_reduce(pyhvd_ready_table *t, const pyhvd_order_entry *decided);

/* After an entry of the order was taken: drop the items whose rounds it has ended. */
void pyhvd_payloads_settle(pyhvd_ready_table *t, const pyhvd_order_entry *entry);

/* The results of the batch at a position of the log. In the order of the slots, each is aligned to
 * PYHVD_PAYLOAD_ALIGNMENT. */
const uint8_t *pyhvd_payloads_results(const pyhvd_ready_table *t, uint64_t position);

static inline size_t pyhvd_payload_room(size_t bytes) {
    return (bytes + PYHVD_PAYLOAD_ALIGNMENT - 1) & ~(size_t)(PYHVD_PAYLOAD_ALIGNMENT - 1);
}

#endif
