/* MPI as the carrier of links, for fabrics that only MPI reaches at full speed. The extension never
 * links MPI: Python finds the functions in the library that mpi4py has loaded.
 *
 * A frame is two messages: its header, and its bytes if there are any. Each kind has its own tag, and
 * MPI keeps the order of each. So a receiver knows a frame's length before it receives the bytes.
 *
 * Invariants
 *   1. The communicator belongs to the links of one process set, and returns errors.
 *   2. No call blocks: a rank can leave a link whose peer is lost, with requests that never complete.
 *   3. The last message of a frame is sent synchronously: its request completes when the peer
 *      receives it. So a rank that stops calling MPI leaves no frame in MPI's own queues.
 *   4. A handle of any MPI fits into 64 bits. By value a narrower one is passed in the same register,
 *      with the lower bits. In memory it is the first bytes; the rest stays 0.
 */
#ifndef PYHVD_MPI_H
#define PYHVD_MPI_H

#include "links/link.h"

#define PYHVD_MPI_MOST 1073741824 /* bytes of a frame, at most: MPI counts by int */

struct pyhvd_mpi {
    int (*isend)(const void *, int, int64_t, int, int, int64_t, int64_t *);
    int (*issend)(const void *, int, int64_t, int, int, int64_t, int64_t *);
    int (*irecv)(void *, int, int64_t, int, int, int64_t, int64_t *);
    int (*improbe)(int, int, int64_t, int *, int64_t *, void *);
    int (*imrecv)(void *, int, int64_t, int64_t *, int64_t *);
    int (*test)(int64_t *, int *, void *);
    int64_t communicator, byte; /* MPI_BYTE */
    int64_t no_request;         /* MPI_REQUEST_NULL */
};

/* Change a link's carrier: to MPI, with the peer's rank and two tags from `tag` on; NULL: the socket. */
void pyhvd_link_carry(pyhvd_link *link, const pyhvd_mpi *mpi, int peer, int tag);

/* Whether MPI may still read or write memory of the link's frames. */
int pyhvd_mpi_is_busy(const pyhvd_link *link);

/* Start to send what waits; return whether anything has started or been sent. */
int pyhvd_mpi_send(pyhvd_link *link);

/* Receive the header (while there is none) or the bytes of a frame, n bytes; return n, or 0 if they
 * have not arrived. */
size_t pyhvd_mpi_fetch(pyhvd_link *link, void *to, size_t n);

#endif
