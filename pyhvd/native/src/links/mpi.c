/* Links over MPI; mpi.h states the invariants. */
#include "links/mpi.h"

#include <errno.h>

/* Larger than any MPI's status, and never read. */
typedef struct {
    _Alignas(8) uint8_t bytes[64];
} any_status;

void pyhvd_link_carry(pyhvd_link *link, const pyhvd_mpi *mpi, int peer, int tag) {
    link->mpi = mpi;
    link->peer = peer;
    link->mpi_tag = tag;
    link->started = link->last;
}

int pyhvd_mpi_is_busy(const pyhvd_link *link) {
    return link->mpi && (link->is_receiving || link->first != link->last);
}

/* Return whether an MPI call has succeeded; else set the link's error. */
static int succeeded(pyhvd_link *link, int code) {
    if (code) link->error = EIO;
    return !code;
}

static int has_ended(pyhvd_link *link, int64_t *request) {
    any_status status;
    int flag = 0;
    return succeeded(link, link->mpi->test(request, &flag, &status)) && flag;
}

static int start(pyhvd_link *link, const pyhvd_posted_frame *frame, int64_t *requests) {
    const pyhvd_mpi *m = link->mpi;
    int n = (int)frame->header.bytes, tag = link->mpi_tag;
    requests[0] = requests[1] = 0;
    int code = (n ? m->isend : m->issend)(&frame->header, (int)sizeof frame->header, m->byte,
                                          link->peer, tag, m->communicator, &requests[0]);
    if (n && !code)
        code = m->issend(frame->bytes, n, m->byte, link->peer, tag + 1, m->communicator,
                         &requests[1]);
    if (!n) requests[1] = m->no_request;
    return succeeded(link, code);
}

int pyhvd_mpi_send(pyhvd_link *link) {
    uint32_t first = link->first, from = link->started;
    for (; link->started != link->last; link->started++) {
        uint32_t k = link->started % PYHVD_LINK_FRAMES;
        if (!start(link, &link->posted[k], link->sending[k])) return 0;
    }
    for (; link->first != link->last; link->first++) {
        const pyhvd_posted_frame *frame = &link->posted[link->first % PYHVD_LINK_FRAMES];
        int64_t *requests = link->sending[link->first % PYHVD_LINK_FRAMES];
        if (!has_ended(link, &requests[0]) || !has_ended(link, &requests[1])) break;
        link->bytes_sent += sizeof frame->header + frame->header.bytes;
        --*frame->unsent;
    }
    return link->first != first || link->started != from;
}

/* Begin to receive: a header that has arrived, or a frame's bytes. Return whether that was done. */
static int begin(pyhvd_link *link, void *to, size_t n) {
    const pyhvd_mpi *m = link->mpi;
    any_status status;
    int64_t message = 0;
    int flag = 0, code;
    link->receiving = 0;
    if (link->received)
        return succeeded(link, m->irecv(to, (int)n, m->byte, link->peer, link->mpi_tag + 1,
                                        m->communicator, &link->receiving));
    code = m->improbe(link->peer, link->mpi_tag, m->communicator, &flag, &message, &status);
    if (!succeeded(link, code) || !flag) return 0;
    return succeeded(link, m->imrecv(to, (int)n, m->byte, &message, &link->receiving));
}

size_t pyhvd_mpi_fetch(pyhvd_link *link, void *to, size_t n) {
    if (!link->is_receiving) link->is_receiving = begin(link, to, n);
    if (!link->is_receiving || !has_ended(link, &link->receiving)) return 0;
    link->is_receiving = 0;
    link->bytes_received += n;
    return n;
}
