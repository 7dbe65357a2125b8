/* The order across hosts: how hosts agree on cached tensors, and on one log, without a sequencer.
 *
 * A pure state machine in memory that it is given: no I/O, no threads, no allocation. The memory
 * contains no addresses, so every rank of a host may map it elsewhere. All calls are made under the
 * lock of the host's ready table.
 *
 * A host *announces* a slot of a process set once all its ranks have marked the slot ready. Host 0
 * also announces response *lists*, which recall and delegate slots. A host numbers its messages by
 * a *count*. A message goes to every other host, and the messages of one host arrive in the order
 * of sending. A message states the sender's count `before` it, the `stamp` of its slots and its
 * list, and the count afterwards, `upto`; before < stamp <= upto.
 *
 * The log consists of lists, with their stamps as their times, and of batches. A *batch* has all
 * slots of one set that every host has announced and whose highest stamp is the batch's time; but if
 * they lie more than PYHVD_RANGE_WORDS words apart, it has those in the first words alone, and another
 * batch follows. The log is in the order of (time, lists before batches, set, slots). An entry is
 * *final* on a host when the counts of all hosts, as known there, have reached its time.
 *
 * Rounds. A slot's *round* is 2 * (the recalls of it in this host's log) + (the parity of the
 * decisions on it). An announcement carries the round of its slot on the sender. A host keeps two
 * cells per slot: one for its current round, one for the latest later round that it knows.
 *
 *   the announcement's round              cell      because
 *   ------------------------------------  --------  --------------------------------------------
 *   the current one                       current
 *   fewer recalls than the current round  none      a recall comes before it in every log
 *   as many recalls, other parity         next      the sender has seen one more decision
 *   more recalls than the next cell       next      the sender has passed a recall before which
 *                                                   the next cell's round was not decided
 *   fewer recalls than the next cell      none      the same
 *
 * Digests. An announcement may carry a digest of a slot of the set's last word; of other slots it is 0. A
 * cell keeps what the digests of its hosts make together: their one value, or PYHVD_ORDER_UNLIKE if two
 * differ. A batch says which of its slots have unlike digests.
 *
 *   known digest    the announcement's   together
 *   --------------  -------------------  ------------------
 *   none            d                    d
 *   d               d                    d
 *   anything else                        PYHVD_ORDER_UNLIKE
 *
 * Invariants
 *   1. The log depends on stamps alone. Stamps travel in messages that keep their order, so all
 *      hosts compute one log.
 *   2. A host carries out an entry only when it is final, and in the order of the log. A host's
 *      later stamps are above its count, so no entry can still come before a final one.
 *   3. A count never goes back. An announced slot stays announced until the log decides it or
 *      recalls it.
 *   4. A host announces a slot once in a round. So the set of hosts that have announced it and the
 *      highest stamp are all that a cell needs: O(1) state per slot.
 *   5. A host is ahead of another one by at most one decision on a slot, because a decision needs
 *      every host. It may be ahead by any number of recalls.
 *   6. No round but the current one is decided before this host announces the slot in that round.
 *      So all known later rounds with more recalls have one parity, and of two of them the one with
 *      fewer recalls is never decided.
 *   7. A stamp is at least the known stamps of the message's slots. So the message that completes
 *      several slots makes one batch of them, as it announces one range.
 *   8. Batches of sets that lie within one host are put into that host's log between the entries,
 *      wherever the host likes. No other host sees them, so hosts cannot wait for each other in a
 *      circle. Sets over several, but not all, hosts use response lists only.
 *   9. Every host has the same lists at the same positions of its ring. A message tells up to which
 *      position the sender has `taken` them. Host 0 announces a list only if it overwrites nothing
 *      that a host has not taken, as far as host 0 knows, so no ring overflows.
 *  10. A message also tells how many `entries` of the log the sender has taken (payloads.h uses it).
 *  11. A host owes a message once it has taken more than half of the ring since its last message. A
 *      list takes at most half of the ring, with the gap before it. So host 0 always gets room
 *      again.
 *  12. Every range has at most PYHVD_RANGE_WORDS words. So a list of PYHVD_ORDER_RANGES ranges with at
 *      most 1024 values is within PYHVD_ORDER_LIST_MAX, and an announcement within a frame.
 *  13. The digests of a batch's slots come from the announcements of one round of each slot, one of each
 *      host. Putting digests together is associative and commutative. So all hosts find the same slots
 *      unlike.
 *
 * Delays. A host that announces a slot raises its count above all counts that it knows. So its
 * count has reached the stamps that the others will give, and the last announcement makes the slot
 * final everywhere. Where messages cross, a host may owe an *empty* message: a complete slot or a
 * list has a time above the host's own count.
 *
 * Messages consist of 64-bit words in the processor's byte order, which is little-endian on all
 * hosts of a job:
 *   message  pyhvd_order_header, sections of announced slots, one list or none
 *   list     pyhvd_order_list_head, audience padded to words, recalled and delegated sections
 *   section  pyhvd_order_section, words of bits, values
 * The values of a section are one for all its slots, or one for each slot, ascending: rounds of
 * announced slots, versions of delegated ones, none of recalled ones. A section of kind PYHVD_COMPARED has
 * announced slots, and behind the rounds a digest for each slot of its last word.
 */
#ifndef PYHVD_HOST_ORDER_H
#define PYHVD_HOST_ORDER_H

#include "agreement/ready_table.h"

#define PYHVD_ORDER_RING 131072                     /* bytes for lists that are not taken */
#define PYHVD_ORDER_LIST_MAX (PYHVD_ORDER_RING / 4) /* bytes of one encoded list */
#define PYHVD_ORDER_COUNT_MAX (UINT64_C(1) << 62)
#define PYHVD_ORDER_RANGES 32         /* recalled and delegated ones of a list */
#define PYHVD_ORDER_UNLIKE UINT64_MAX /* instead of a digest: two hosts' differ */

/* An argument is out of range; or a message is malformed or out of order. After such a message the
 * order stays safe to call, but it may be incomplete: the job has to end. */
enum { PYHVD_ORDER_INVALID = -4 };

typedef struct {
    uint32_t bytes; /* of the message */
    uint32_t list;  /* where the list begins (bytes); 0: none */
    uint64_t before, stamp, upto, taken, entries;
} pyhvd_order_header;

typedef struct {
    uint64_t time;   /* the message's stamp */
    uint64_t number; /* of the response list; 0: a recall or a delegation only */
    uint32_t bytes;  /* with this head */
    uint32_t audience_bytes;
} pyhvd_order_list_head;

enum { PYHVD_ANNOUNCED = 1, PYHVD_RECALLED, PYHVD_DELEGATED, PYHVD_COMPARED };

typedef struct {
    uint16_t kind, set;
    uint16_t first, end; /* words [first, end) of the set follow */
    uint64_t n;          /* and then values */
} pyhvd_order_section;

/* Slots of one set: words [first, end), of which `words` has the first one first. */
typedef struct {
    uint32_t kind, set, first, end;
    const uint64_t *words, *values;
    uint64_t n; /* values: none, one for all slots, or one for each slot, ascending */
    /* To be announced: the digests of the 64 slots of the set's last word; NULL: they are 0. Read from a
     * message: those of the slots in the section's last word, ascending. */
    const uint64_t *digests;
} pyhvd_slot_range;

/* A response list, with at most PYHVD_ORDER_RANGES ranges. `audience` are opaque bytes: the ranks of the job that it concerns. */
typedef struct {
    uint64_t number;
    const uint8_t *audience;
    uint32_t audience_bytes;
    uint32_t n; /* ranges, recalled ones and delegated ones, whose values are versions */
    const pyhvd_slot_range *ranges;
} pyhvd_order_list;

/* What is known of one round of a slot. */
typedef struct {
    uint64_t round;
    uint64_t hosts;  /* bits: which hosts have announced it */
    uint64_t time;   /* their highest stamp */
    uint64_t digest; /* what their digests make together */
} pyhvd_order_cell;

/* 64 slots. */
typedef struct {
    uint64_t announced;                     /* by this host, in the current round */
    uint64_t complete;                      /* announced by all hosts, in the current round */
    uint64_t unlike;                        /* complete ones with unlike digests */
    pyhvd_order_cell current[64], next[64]; /* next: unused if it has no hosts */
} pyhvd_order_group;

typedef struct pyhvd_host_order {
    uint32_t host, hosts, sets, words;
    uint64_t counts[PYHVD_MAX_HOSTS];    /* as known here; never go back */
    uint64_t taken[PYHVD_MAX_HOSTS];     /* positions in the ring, as known here; the same */
    uint64_t entries[PYHVD_MAX_HOSTS];   /* entries of the log that were taken; the same */
    uint64_t told;                       /* taken[host] in this host's last message */
    uint64_t tail;                       /* of the ring */
    uint64_t latest;                     /* time of any entry so far */
    uint32_t complete[PYHVD_MAX_SETS];   /* slots of a set that are complete */
    uint64_t ring[PYHVD_ORDER_RING / 8]; /* lists, none cut at the ring's end */
    pyhvd_order_group groups[];          /* [sets][words] */
} pyhvd_host_order;

/* An entry of the log. */
typedef struct {
    uint32_t kind;            /* PYHVD_BATCH, PYHVD_LIST */
    uint32_t set, first, end; /* batch: words [first, end) are used */
    uint64_t time;
    uint64_t words[PYHVD_RANGE_WORDS]; /* batch: its slots, word `first` first */
    uint64_t unlike;                   /* batch: those of the set's last word with unlike digests */
    uint64_t number;                   /* list: as announced ... */
    const uint8_t *audience;           /* ... in the ring, until the next call with this order */
    uint32_t audience_bytes;
    const uint64_t *sections, *sections_end; /* list: for pyhvd_host_order_next_range */
} pyhvd_order_entry;

/* The group of the slots of a word. */
static inline pyhvd_order_group *pyhvd_order_group_at(const pyhvd_host_order *o, uint32_t set,
                                                      uint32_t word) {
    return (pyhvd_order_group *)&o->groups[(size_t)set * o->words + word];
}

/* What two digests make together. */
static inline uint64_t pyhvd_order_compare(uint64_t a, uint64_t b) {
    return a == b ? a : PYHVD_ORDER_UNLIKE;
}

size_t pyhvd_host_order_bytes(uint32_t sets, uint32_t slots);

/* Begin; on one rank, before any rank uses the order. `o` has pyhvd_host_order_bytes bytes, aligned
 * to 8. There is one host, set and word at least, and the PYHVD_MAX_ number at most; `slots` is a multiple
 * of 64. */
void pyhvd_host_order_init(pyhvd_host_order *o, uint32_t host, uint32_t hosts, uint32_t sets,
                           uint32_t slots);

/* Announce the slots of n disjoint ranges that all ranks of this host have marked, and a list (host
 * 0 only) or NULL. Slots that are announced already are left out. Write the message for all other
 * hosts, and return its bytes; 0: there is nothing to announce; PYHVD_LATER: `room` (bytes) is too
 * small, or the ring is full; PYHVD_ORDER_INVALID: the list is malformed, or encoded larger than
 * PYHVD_ORDER_LIST_MAX. Only a message that was returned has changed the order. */
int64_t pyhvd_host_order_announce(pyhvd_host_order *o, const pyhvd_slot_range *ranges, uint32_t n,
                                  const pyhvd_order_list *list, uint64_t *out, size_t room);

/* Write the empty message that this host owes, and return its bytes; 0: it owes none; PYHVD_LATER:
 * `room` is too small. */
int64_t pyhvd_host_order_owed(pyhvd_host_order *o, uint64_t *out, size_t room);

/* Take the next message of another host. Return 0, or PYHVD_ORDER_INVALID; nothing is read beyond
 * `bytes`, whatever the message contains. */
int pyhvd_host_order_receive(pyhvd_host_order *o, uint32_t source, const uint64_t *message,
                             size_t bytes);

/* Whether the ring has room for any list. */
int pyhvd_host_order_has_room(const pyhvd_host_order *o);

/* Take the next entry of the log; return 0 if it is not final, or there is none. */
int pyhvd_host_order_take(pyhvd_host_order *o, pyhvd_order_entry *entry);

/* Read the next recalled or delegated range of a list; return 0 after the last one. */
int pyhvd_host_order_next_range(const pyhvd_host_order *o, pyhvd_order_entry *entry,
                                pyhvd_slot_range *range);

#endif
