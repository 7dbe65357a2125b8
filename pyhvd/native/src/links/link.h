/* A link: a stream of frames between two ranks on different hosts, over a connected, non-blocking
 * stream socket, or over MPI (mpi.h). No function blocks.
 *
 * A frame is a header, with a tag and a length, and that many bytes. The frames of a link arrive in
 * the order of posting. The receiver learns a frame's header first, and then says where its bytes
 * go. Until it does, the link stands still, and soon its sender does too.
 *
 * Invariants
 *   1. One thread at a time uses a link.
 *   2. A posted frame's bytes stay unchanged until the link has sent them, and counted `unsent`
 *      down. Whoever posts keeps at most PYHVD_LINK_FRAMES frames in the link.
 *   3. The length of an arriving frame is the receiver's to check, before it accepts the frame.
 *   4. Once `error` is set, the link moves nothing any more.
 *   5. Headers are in the machine's byte order: all hosts of a job have the same one.
 *   6. The carrier changes only while no frame is in the link, at either end.
 *   7. Over MPI the socket stays open. A rank that leaves in order sends one byte, because the peer
 *      may still be receiving its last frames. The socket's end without it means that the rank is
 *      lost.
 */
#ifndef PYHVD_LINK_H
#define PYHVD_LINK_H

#include <stddef.h>
#include <stdint.h>

#define PYHVD_LINK_FRAMES 32   /* frames that wait in a link, at most; a power of two */
#define PYHVD_LINK_STAGED 4096 /* bytes: shorter reads go through a buffer */
typedef struct pyhvd_mpi pyhvd_mpi;

#define PYHVD_LINK_CLOSED \
    10000 /* `error` after the peer's orderly close; no errno has this value */

typedef struct {
    uint64_t tag, bytes;
} pyhvd_frame;

typedef struct {
    pyhvd_frame header;
    const uint8_t *bytes;
    uint32_t *unsent;
} pyhvd_posted_frame;

typedef struct {
    int fd;
    int error; /* errno, or PYHVD_LINK_CLOSED */
    uint64_t bytes_sent, bytes_received;
    uint32_t awaited; /* frames that the user still expects; for the user's own use */
    /* Frames first to last - 1 wait; `sent` bytes of the first one are gone, header included. */
    pyhvd_posted_frame posted[PYHVD_LINK_FRAMES];
    uint32_t first, last;
    size_t sent;
    /* The frame that arrives, and how many bytes of it have, header included. */
    pyhvd_frame arriving;
    size_t received;
    uint8_t *into; /* where its bytes go; NULL until it is accepted */
    /* Bytes that were read ahead. */
    uint32_t staged_from, staged_to;
    uint8_t staged[PYHVD_LINK_STAGED];
    /* Over MPI: the peer's rank; the tag of headers (the next one is that of bytes); the requests of
     * frames first to started - 1, of their headers and their bytes; and of what arrives. */
    const pyhvd_mpi *mpi; /* NULL: over the socket */
    int peer, mpi_tag;
    uint32_t started;
    int64_t sending[PYHVD_LINK_FRAMES][2], receiving;
    int is_receiving;
} pyhvd_link;

/* What pyhvd_link_receive returns. */
enum {
    PYHVD_LINK_WAITS = 0, /* nothing more has arrived */
    PYHVD_LINK_ASKS = 1,  /* `arriving` is complete: accept it */
    PYHVD_LINK_ARRIVED =
        2, /* all bytes of `arriving` are there; the next call is about the next one */
};

void pyhvd_link_open(pyhvd_link *link, int fd);

/* Add a frame to those that wait; when it is sent, *unsent decreases by one. */
void pyhvd_link_post(pyhvd_link *link, uint64_t tag, const uint8_t *bytes, size_t n,
                     uint32_t *unsent);

/* Send what the connection takes; return whether it took anything. */
int pyhvd_link_send(pyhvd_link *link);

/* Receive until something is to be decided; on an error PYHVD_LINK_WAITS. */
int pyhvd_link_receive(pyhvd_link *link);

/* Whether a frame with this tag waits in the link. */
int pyhvd_link_holds(pyhvd_link *link, uint64_t tag);

/* Over MPI: look whether the peer is lost. */
void pyhvd_link_look(pyhvd_link *link);

static inline void pyhvd_link_accept(pyhvd_link *link, uint8_t *into) { link->into = into; }

/* Whether the arriving frame waits to be accepted. */
static inline int pyhvd_link_stands_still(const pyhvd_link *link) {
    return link->received == sizeof(pyhvd_frame) && !link->into;
}

/* Whether frames wait to be sent. */
static inline int pyhvd_link_has_unsent(const pyhvd_link *link) {
    return link->first != link->last;
}

#endif
