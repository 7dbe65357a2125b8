/* Agreement between hosts: the ready table of a host that is one of several, and its connections to
 * its neighbours in the tree of hosts (host_tree.h). Without a tree all other hosts are neighbours.
 *
 * Two neighbours have one connection, which all ranks of both hosts share. It carries frames: the
 * messages of the orders (host_order.h), payloads (payloads.h), rings for the background threads of
 * single ranks, a note when a rank fails or a host is lost, beats, and a goodbye. Any rank may send
 * and receive for its host:
 * whoever has just written a frame, or waits. So no rank waits for a leader's turn.
 *
 * All sets whose ranks are on every host agree here. When all ranks of a host have marked a slot of
 * such a set, the host announces the slot. When every host has announced it, the slot becomes part
 * of a batch in the order, and each host appends the batch to its ready log. The response lists are
 * entries of the same order, and carry which slots they recall and delegate. Sets within one host
 * agree in its table alone.
 *
 * Rings and notes pass through neighbours:
 *   1. A ring goes to the neighbour on the way to its host.
 *   2. A host passes the first note that it gets, or makes, on to all neighbours but the sender. So
 *      each host gets one, and the notes that arrive before a neighbour ends are about the same host.
 *   3. A host that finds a neighbour lost makes a note of that.
 *
 * Shared words
 *   1. The orders, `written` and `out` of a peer, and `note` are written under the ready table's lock.
 *      `written` is stored (release) after the bytes of the frame, and loaded (acquire) by the
 *      sender.
 *   2. `sent` belongs to the holder of `sending`, and is stored (release) after the bytes have left,
 *      so that a writer who loads it (acquire) may overwrite them.
 *   3. `in` and `received` belong to the holder of `receiving`, which is taken before the table's
 *      lock and never waited for: it handles the frames that have arrived for all ranks.
 *   4. Who fails to take `sending` has stored `written` before. The holder looks at `written` again
 *      after it has released `sending`. Sequentially consistent fences between the two steps of each
 *      make one of them see the other, so no frame stays behind.
 *   5. `lost` is stored (release) once, after `finder`, `error` and `note`, and loaded (acquire) before them.
 *   6. The counters of a peer are written by relaxed stores, and any thread may read them: `received`
 *      by the holder of `receiving`, the others under the table's lock. The own host's `late` counts
 *      tensors for which no other host was awaited.
 *
 * Beats
 *   1. A thread of each rank looks once a second. It sends a beat to all neighbours, unless another
 *      rank of its host has done so in this second. Frames that nobody has received since the last look
 *      count as heard at this one. So it looks twice a second while there is more than beats, and a host
 *      is lost at most 5.5 s after its last frame.
 *   2. While no thread of its host sleeps on the connections, or a beat is overdue, it looks every
 *      PYHVD_BEAT_LOOK_NS, and receives what nobody else has received.
 *   3. A neighbour from which nothing has come for PYHVD_SILENT_NS is lost. The thread receives before
 *      it decides, so a rank that was stopped itself finds the beats that came meanwhile.
 *   4. It needs neither the GIL nor any other thread: a rank that computes, or waits, still beats.
 *
 * Sleeping
 *   1. A thread that waits for other hosts sleeps in poll(2) on the connections, and on a bell of its
 *      own. It sets its flag in the rank state to PYHVD_POLLS; a waker then rings the bell.
 *   2. Every sleeping rank of a host is woken by an arriving frame, and one of them handles it.
 *   3. The background thread sleeps on its bell, and on `messages`: a descriptor of Python that is
 *      readable when a message has come, or can be sent. While another thread of its rank receives
 *      frames, it does not sleep on the connections: its flag is PYHVD_POLLS_BELL.
 */
#ifndef PYHVD_AGREEMENT_H
#define PYHVD_AGREEMENT_H

#include <pthread.h>

#include "common/counters.h"
#include "agreement/host_tree.h"
#include "agreement/payloads.h"

#define PYHVD_FRAME_MAX 49152 /* bytes of a frame, at most */
#define PYHVD_BEAT_NS 1000000000
#define PYHVD_BEAT_LOOK_NS 250000000 /* between two looks of a thread that receives itself */
#define PYHVD_SILENT_NS 5000000000
#define PYHVD_OUT_RING 262144 /* bytes of frames that wait to be sent to a host; a power of two */
#define PYHVD_CLOSED_BY_PEER 10000 /* `error`: the other host has closed the connection */

/* What a host shares with regard to a neighbour. */
typedef struct {
    _Alignas(PYHVD_LINE) _Atomic uint32_t sending;
    _Atomic uint32_t left; /* whether the host has said goodbye */
    _Alignas(PYHVD_LINE) _Atomic uint64_t written;
    _Alignas(PYHVD_LINE) _Atomic uint64_t sent;
    _Atomic int64_t heard_ns; /* when anything last came; stored by who receives */
    uint32_t received;        /* bytes of `in` */
    pyhvd_host_counters counters;
    _Alignas(8) uint8_t out[PYHVD_OUT_RING];
    _Alignas(8) uint8_t in[PYHVD_FRAME_MAX];
} pyhvd_peer_host;

typedef struct {
    _Alignas(PYHVD_LINE) _Atomic uint32_t receiving;
    _Alignas(
        PYHVD_LINE) _Atomic uint32_t lost; /* 1 + a host that is lost or has sent a note; or 0 */
    _Atomic int64_t beat_ns;               /* when a rank of this host last sent a beat */
    _Atomic uint32_t leavers;              /* local ranks that have left */
    /* The host whose announcement came last, and the local rank that made it if it is the own host; until
     * when (ns) waiting for hosts was counted. Guarded by the table's lock. */
    uint32_t announcer, announcing_rank;
    int64_t counted_until;
    uint32_t finder; /* the host that has found the other one lost; the same host for a note */
    int error;       /* errno, or PYHVD_CLOSED_BY_PEER; 0: a note */
    uint32_t note_bytes;
    uint8_t note[PYHVD_NOTE];
    pyhvd_payloads payloads;
    pyhvd_peer_host peers[]; /* by host, then the orders */
} pyhvd_shared_agreement;

/* One rank's view. */
struct pyhvd_agreement {
    pyhvd_host_tree tree;
    int fds[PYHVD_MAX_HOSTS];            /* connections by host; -1: not a neighbour */
    int progress_bells[PYHVD_MAX_LOCAL]; /* by local rank */
    int background_bells[PYHVD_MAX_LOCAL];
    int messages; /* of this rank's background thread; -1: none. Set before that thread starts */
    uint32_t ranks[PYHVD_MAX_LOCAL]; /* the global rank of each local one */
    pyhvd_shared_agreement *shared;
    /* The table lock's holder's: scratch memory; whether it announces because of a child's message. */
    uint64_t frame[PYHVD_FRAME_MAX / 8];
    int relays;
    /* The beats' thread; `beating` is guarded by the mutex. */
    pthread_t beats;
    pthread_mutex_t mutex;
    pthread_cond_t ended;
    int beating;
    uint64_t looked_at; /* bytes that had come at its last look */
};

/* Bytes for the shared part, for tables with that many slots per set; the tree has its neighbours. */
size_t pyhvd_agreement_bytes(const pyhvd_agreement *a, uint32_t slots);

/* View the shared part at `base`, aligned to PYHVD_LINE. The tree, fds, bells and ranks are set. */
void pyhvd_agreement_attach(pyhvd_agreement *a, void *base, uint32_t slots);

/* Begin; on one rank of the host, before any rank uses the agreement. */
void pyhvd_agreement_clear(pyhvd_agreement *a, uint32_t slots);

/* ---- under the table's lock ---- */

/* Announce the slots of a range, words [first, end), of which `words` has the first one first, and which
 * all local members have marked, if the hosts below have too; carry on. */
void pyhvd_agreement_announce(pyhvd_ready_table *t, uint32_t set, uint32_t first, uint32_t end,
                              const uint64_t *words, pyhvd_ranks *audience);

/* Append to the ready log what the order has decided; tell the others what this host owes them. */
void pyhvd_agreement_carry_on(pyhvd_ready_table *t, pyhvd_ranks *audience);

/* ---- with no lock; each takes what it needs ---- */

/* On host 0: read which slots of a set each host has announced, as far as host 0 knows:
 * [hosts][words]. */
void pyhvd_agreement_read(pyhvd_ready_table *t, uint32_t set, uint64_t *announced);

/* On host 0: announce a response list, or with number 0 only its recalls and delegations. Return 0
 * if there is no room now. */
int pyhvd_agreement_announce_list(pyhvd_ready_table *t, const pyhvd_order_list *list);

/* Wake the background thread of a rank on another host. */
void pyhvd_agreement_ring(pyhvd_ready_table *t, uint32_t host, uint32_t local_rank);

/* Tell all hosts that this rank fails, with a note; or, by the last local rank, that this host ends
 * without failure. */
void pyhvd_agreement_abort(pyhvd_ready_table *t, const uint8_t *note, size_t bytes);
void pyhvd_agreement_leave(pyhvd_ready_table *t);

/* Send what waits; whoever has changed the table calls it after it has released the lock. */
void pyhvd_agreement_send(const pyhvd_ready_table *t);

/* Handle what has arrived, unless another thread is doing so; return whether there was anything. */
int pyhvd_agreement_receive(pyhvd_ready_table *t);

/* Start and stop this rank's beats; from one thread. Return 0 if there can be no thread. */
int pyhvd_agreement_start_beats(pyhvd_ready_table *t);
void pyhvd_agreement_stop_beats(pyhvd_ready_table *t);

/* Wait, at most `ns`, until a host is lost or has sent a note; return whether that is so. */
int pyhvd_agreement_await_lost(pyhvd_ready_table *t, int64_t ns);

/* Sleep until a frame arrives, `bell` rings, or `ns` have passed. */
void pyhvd_agreement_poll(const pyhvd_ready_table *t, int bell, int64_t ns);

/* As this rank's background thread: sleep until its bell rings, `messages` is readable, a frame arrives
 * unless another thread receives frames (`attended`), or `ns` have passed. Return whether `messages` is
 * readable. */
int pyhvd_agreement_rest(const pyhvd_ready_table *t, int attended, int64_t ns);

/* 1 + the host that is lost or has sent a note; or 0. */
static inline uint32_t pyhvd_agreement_lost(const pyhvd_ready_table *t) {
    return t->agreement ? atomic_load_explicit(&t->agreement->shared->lost, memory_order_acquire)
                        : 0;
}

#endif
