/* Collectives that move bytes through the slots and reduce nothing; window.h states the
 * invariants. */
#include "window/layout.h"

#include <string.h>

/* Store where blocks begin that lie one behind the other. */
static void find_starts(const int64_t *counts, int n, int64_t *starts) {
    int64_t at = 0;
    for (int q = 0; q < n; at += counts[q++]) starts[q] = at;
}

int pyhvd_window_gather(pyhvd_window *w, const uint8_t *send, uint8_t *recv,
                        const int64_t *counts) {
    int64_t longest = 0, chunk = (int64_t)w->chunk, starts[PYHVD_MAX_LOCAL] = {0};
    find_starts(counts, w->size, starts);
    for (int q = 0; q < w->size; q++) longest = MAX(longest, counts[q]);
    if (recv + starts[w->rank] != send)
        memmove(recv + starts[w->rank], send, (size_t)counts[w->rank]);
    for (int64_t from = 0; from < longest; from += chunk) {
        int64_t mine = MIN(counts[w->rank] - from, chunk);
        if (pyhvd_await_free_slot(w, w->chunks)) return PYHVD_ABORTED;
        if (mine > 0) memcpy(slot_of(w, w->rank, w->chunks), send + from, (size_t)mine);
        pyhvd_announce(w, PACKED, w->chunks + 1);
        for (int k = 1; k < w->size; k++) { /* each rank begins with a different peer */
            int q = (w->rank + k) % w->size;
            int64_t theirs = MIN(counts[q] - from, chunk);
            if (pyhvd_await(w, q, PACKED, w->chunks + 1)) return PYHVD_ABORTED;
            if (theirs > 0)
                memcpy(recv + starts[q] + from, slot_of(w, q, w->chunks), (size_t)theirs);
        }
        pyhvd_announce(w, REDUCED, w->chunks + 1);
        w->chunks++;
    }
    return PYHVD_OK;
}

/* Store the largest of the ranks' values in all of them. */
static int largest(pyhvd_window *w, int64_t *value) {
    memcpy(flat_of(w, w->rank), value, sizeof *value);
    pyhvd_announce(w, FLATS, w->flats + 1);
    for (int q = 0; q < w->size; q++) {
        int64_t theirs;
        if (q != w->rank && pyhvd_await(w, q, FLATS, w->flats + 1)) return PYHVD_ABORTED;
        memcpy(&theirs, flat_of(w, q), sizeof theirs);
        *value = MAX(*value, theirs);
    }
    w->flats++;
    return PYHVD_OK;
}

int pyhvd_window_barrier(pyhvd_window *w) {
    int64_t nothing = 0;
    return largest(w, &nothing);
}

int pyhvd_window_alltoall(pyhvd_window *w, const uint8_t *send, const int64_t *send_counts,
                          uint8_t *recv, const int64_t *recv_counts) {
    int64_t send_starts[PYHVD_MAX_LOCAL], recv_starts[PYHVD_MAX_LOCAL];
    int64_t part = (int64_t)(w->chunk / (size_t)w->size) & ~(int64_t)63, longest = 0;
    for (int q = 0; q < w->size; q++)
        if (q != w->rank) longest = MAX(longest, send_counts[q]);
    find_starts(send_counts, w->size, send_starts);
    find_starts(recv_counts, w->size, recv_starts);
    if (largest(w, &longest)) return PYHVD_ABORTED;
    memmove(recv + recv_starts[w->rank], send + send_starts[w->rank], (size_t)send_counts[w->rank]);
    for (int64_t from = 0; from < longest; from += part) {
        uint8_t *slot = slot_of(w, w->rank, w->chunks);
        if (pyhvd_await_free_slot(w, w->chunks)) return PYHVD_ABORTED;
        for (int q = 0; q < w->size; q++) {
            int64_t n = q == w->rank ? 0 : MIN(send_counts[q] - from, part);
            if (n > 0) memcpy(slot + q * part, send + send_starts[q] + from, (size_t)n);
        }
        pyhvd_announce(w, PACKED, w->chunks + 1);
        for (int k = 1; k < w->size; k++) {
            int q = (w->rank + k) % w->size;
            int64_t n = MIN(recv_counts[q] - from, part);
            const uint8_t *theirs = slot_of(w, q, w->chunks) + w->rank * part;
            if (pyhvd_await(w, q, PACKED, w->chunks + 1)) return PYHVD_ABORTED;
            if (n > 0) memcpy(recv + recv_starts[q] + from, theirs, (size_t)n);
        }
        pyhvd_announce(w, REDUCED, w->chunks + 1);
        w->chunks++;
    }
    return PYHVD_OK;
}

int pyhvd_window_exchange(pyhvd_window *w, int partner, const uint8_t *send, int64_t send_count,
                          uint8_t *recv, int64_t recv_count) {
    int64_t longest = send_count, chunk = (int64_t)w->chunk;
    if (largest(w, &longest)) return PYHVD_ABORTED;
    for (int64_t from = 0; from < longest; from += chunk) {
        int64_t out = MIN(send_count - from, chunk), in = MIN(recv_count - from, chunk);
        /* Any rank may read what the slot held before; from then on only the partner does. */
        if (from < w->slots * chunk && pyhvd_await_free_slot(w, w->chunks)) return PYHVD_ABORTED;
        if (from >= w->slots * chunk &&
            pyhvd_await(w, partner, REDUCED, w->chunks - (uint64_t)w->slots + 1))
            return PYHVD_ABORTED;
        if (out > 0) memcpy(slot_of(w, w->rank, w->chunks), send + from, (size_t)out);
        pyhvd_announce(w, PACKED, w->chunks + 1);
        if (pyhvd_await(w, partner, PACKED, w->chunks + 1)) return PYHVD_ABORTED;
        if (in > 0) memcpy(recv + from, slot_of(w, partner, w->chunks), (size_t)in);
        pyhvd_announce(w, REDUCED, w->chunks + 1);
        w->chunks++;
    }
    return PYHVD_OK;
}
