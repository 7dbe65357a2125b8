/* Links over stream sockets; link.h states the invariants. */
#include "links/mpi.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "common/portable.h"

#define HEADER sizeof(pyhvd_frame)
#define PARTS 8 /* frames in one system call, at most */

void pyhvd_link_open(pyhvd_link *link, int fd) {
    memset(link, 0, sizeof *link);
    link->fd = fd;
}

static pyhvd_posted_frame *posted_at(pyhvd_link *link, uint32_t k) {
    return &link->posted[k % PYHVD_LINK_FRAMES];
}

void pyhvd_link_post(pyhvd_link *link, uint64_t tag, const uint8_t *bytes, size_t n,
                     uint32_t *unsent) {
    *posted_at(link, link->last++) = (pyhvd_posted_frame){{tag, n}, bytes, unsent};
}

/* Set `error` from errno, unless the call is merely to be repeated. */
static void note_error(pyhvd_link *link) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) link->error = errno;
}

/* List what is left of the first frames; return the number of parts. */
static size_t list_parts(pyhvd_link *link, struct iovec *parts) {
    size_t n = 0, skipped = link->sent;
    for (uint32_t k = link->first; k != link->last && n + 2 <= 2 * PARTS; k++) {
        pyhvd_posted_frame *frame = posted_at(link, k);
        if (skipped < HEADER) {
            parts[n++] = (struct iovec){(uint8_t *)&frame->header + skipped, HEADER - skipped};
            skipped = HEADER;
        }
        skipped -= HEADER;
        if (frame->header.bytes > skipped)
            parts[n++] = (struct iovec){(uint8_t *)(uintptr_t)frame->bytes + skipped,
                                        frame->header.bytes - skipped};
        skipped = 0;
    }
    return n;
}

int pyhvd_link_send(pyhvd_link *link) {
    struct iovec parts[2 * PARTS];
    if (link->error || link->first == link->last) return 0;
    if (link->mpi) return pyhvd_mpi_send(link);
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = list_parts(link, parts)};
    ssize_t sent = sendmsg(link->fd, &message, MSG_NOSIGNAL);
    if (sent <= 0) {
        if (sent < 0) note_error(link);
        return 0;
    }
    link->bytes_sent += (uint64_t)sent;
    link->sent += (size_t)sent;
    while (link->first != link->last) {
        const pyhvd_posted_frame *frame = posted_at(link, link->first);
        if (link->sent < HEADER + frame->header.bytes) break;
        link->sent -= HEADER + frame->header.bytes;
        --*frame->unsent;
        link->first++;
    }
    return 1;
}

/* Read from the socket at most n bytes; return how many came. */
static size_t read_some(pyhvd_link *link, uint8_t *to, size_t n) {
    ssize_t got = recv(link->fd, to, n, 0);
    if (got > 0) {
        link->bytes_received += (uint64_t)got;
        return (size_t)got;
    }
    if (got < 0)
        note_error(link);
    else
        link->error = PYHVD_LINK_CLOSED;
    return 0;
}

/* Move at most n arrived bytes; return how many. A short frame needs one system call with its
 * header, as bytes are read ahead; a long one is not copied. */
static size_t fetch(pyhvd_link *link, uint8_t *to, size_t n) {
    if (link->staged_from == link->staged_to) {
        if (n >= PYHVD_LINK_STAGED) return read_some(link, to, n);
        link->staged_from = 0;
        link->staged_to = (uint32_t)read_some(link, link->staged, PYHVD_LINK_STAGED);
    }
    n = MIN(n, link->staged_to - link->staged_from);
    memcpy(to, link->staged + link->staged_from, n);
    link->staged_from += (uint32_t)n;
    return n;
}

int pyhvd_link_holds(pyhvd_link *link, uint64_t tag) {
    for (uint32_t k = link->first; k != link->last; k++)
        if (posted_at(link, k)->header.tag == tag) return 1;
    return 0;
}

void pyhvd_link_look(pyhvd_link *link) {
    uint8_t byte;
    ssize_t got = recv(link->fd, &byte, 1, MSG_PEEK);
    if (!got) link->error = PYHVD_LINK_CLOSED;
    if (got < 0) note_error(link);
}

int pyhvd_link_receive(pyhvd_link *link) {
    while (!link->error) {
        size_t got, at = link->received;
        if (at < HEADER) {
            got = link->mpi ? pyhvd_mpi_fetch(link, &link->arriving, HEADER)
                            : fetch(link, (uint8_t *)&link->arriving + at, HEADER - at);
        } else if (!link->into) {
            return PYHVD_LINK_ASKS;
        } else if (at == HEADER + link->arriving.bytes) {
            link->received = 0;
            link->into = NULL;
            return PYHVD_LINK_ARRIVED;
        } else {
            size_t left = HEADER + link->arriving.bytes - at;
            got = link->mpi ? pyhvd_mpi_fetch(link, link->into, left)
                            : fetch(link, link->into + (at - HEADER), left);
        }
        if (!got) break;
        link->received += got;
    }
    return PYHVD_LINK_WAITS;
}
