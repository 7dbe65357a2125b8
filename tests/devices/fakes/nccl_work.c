/* Collectives as work on the fake streams: comparison between ranks, steps, sums in ring order. fake_nccl.h states the
 * invariants. */
#define _GNU_SOURCE
#include "fake_nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Thread_local int group_depth;
static _Thread_local struct call *group_first, *group_last;
static _Thread_local ncclResult_t group_result;

static const char *kind_names[] = {"ncclAllReduce", "ncclBroadcast",     "ncclReduce",
                                   "ncclAllGather", "ncclReduceScatter", "ncclSend",
                                   "ncclRecv"};

/* Count a step, and wait until all ranks have reached it. Return 0 if the communicator ends before. */
int nccl_wait_step(ncclComm_t comm) {
    struct shared *shared = comm->shared;
    uint64_t mine = atomic_fetch_add(&shared->step[comm->rank], 1) + 1;
    for (int k = 0; k < comm->n; k++) {
        while (atomic_load(&shared->step[k]) < mine) {
            if (comm->ended) return 0;
            usleep(50);
        }
    }
    return 1;
}

static int is_reduction(int kind) {
    return kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
}

static double factor_of(const struct call *call) {
    if (!is_reduction(call->kind)) return 1;
    if (call->op >= FIRST_FACTOR) return call->comm->factors[call->op - FIRST_FACTOR];
    return call->op == AVG ? 1.0 / call->comm->n : 1;
}

/* Comparison */

static void report_difference(const struct call *call, const struct announced *mine,
                              const struct announced *other, int rank) {
    char text[256];
    snprintf(
        text, sizeof text,
        "rank %d: %s count %lu type %d op %d root %d; rank %d: %s count %lu type %d op %d root %d",
        call->comm->rank, kind_names[mine->kind], (unsigned long)mine->count, mine->dtype, mine->op,
        mine->root, rank, kind_names[other->kind], (unsigned long)other->count, other->dtype,
        other->op, other->root);
    struct fake_site there = other->site;
    there.call = kind_names[other->kind];
    there.from = NULL; /* It may be an address of another process. */
    fake_cuda_report("mismatch", &there, &call->site, text);
    call->comm->state = ncclInvalidUsage;
}

/* Compare the collective with those of all ranks. Return whether all are equal. */
static int all_agree(struct call *call) {
    struct announced mine = {.kind = call->kind,
                             .op = call->op < FIRST_FACTOR ? call->op : FIRST_FACTOR,
                             .dtype = call->dtype,
                             .root = call->peer,
                             .count = call->count,
                             .factor = factor_of(call),
                             .site = call->site};
    struct shared *shared = call->comm->shared;
    int agree = 1;
    shared->announced[call->comm->rank] = mine;
    if (!nccl_wait_step(call->comm)) return 0;
    for (int k = 0; k < call->comm->n; k++) {
        struct announced *other = &shared->announced[k];
        if (other->kind == mine.kind && other->op == mine.op && other->dtype == mine.dtype &&
            other->root == mine.root && other->count == mine.count &&
            other->factor == mine.factor) {
            continue;
        }
        if (agree) report_difference(call, &mine, other, k);
        agree = 0;
    }
    return nccl_wait_step(call->comm) && agree;
}

/* Collectives */

/* Reduce an element: the ring of its chunk starts after the rank that gets the chunk. So the order depends on the element's
 * place alone, and the bits are equal on all ranks. */
static void reduce_element(const struct call *call, uint64_t place, uint64_t total, size_t offset,
                           unsigned char *to) {
    int n = call->comm->n, chunk = (int)(place * (uint64_t)n / total);
    size_t size = nccl_size(call->dtype);
    struct shared *shared = call->comm->shared;
    unsigned char sum[8];
    memcpy(sum, shared->pieces[(chunk + 1) % n] + offset, size);
    for (int k = 2; k <= n; k++)
        nccl_combine(call->dtype, call->op, shared->pieces[(chunk + k) % n] + offset, sum);
    if (call->op == AVG && call->dtype < FLOAT16) nccl_divide(call->dtype, n, sum);
    memcpy(to, sum, size);
}

static void put_piece(const struct call *call, uint64_t at, uint64_t n) {
    size_t size = nccl_size(call->dtype);
    unsigned char *mine = call->comm->shared->pieces[call->comm->rank];
    if (is_reduction(call->kind))
        nccl_scale(call->dtype, factor_of(call), call->send + at * size, mine, n);
    else if (call->kind == ALL_GATHER || call->peer == call->comm->rank)
        memcpy(mine, call->send + at * size, n * size);
}

static void take_piece(const struct call *call, uint64_t at, uint64_t n, uint64_t total) {
    ncclComm_t comm = call->comm;
    size_t size = nccl_size(call->dtype);
    if (call->kind == BROADCAST)
        memcpy(call->recv + at * size, comm->shared->pieces[call->peer], n * size);
    for (int k = 0; call->kind == ALL_GATHER && k < comm->n; k++) {
        memcpy(call->recv + ((uint64_t)k * call->count + at) * size, comm->shared->pieces[k],
               n * size);
    }
    if (!is_reduction(call->kind) || (call->kind == REDUCE && comm->rank != call->peer)) return;
    uint64_t first = call->kind == REDUCE_SCATTER ? (uint64_t)comm->rank * call->count : 0;
    for (uint64_t k = 0; k < n; k++) {
        if (at + k >= first && at + k < first + call->count) {
            reduce_element(call, at + k, total, k * size, call->recv + (at + k - first) * size);
        }
    }
}

static void run_collective(struct call *call) {
    uint64_t total = call->kind == REDUCE_SCATTER ? call->count * (uint64_t)call->comm->n
                                                  : call->count;
    uint64_t most = PIECE / nccl_size(call->dtype);
    if (!all_agree(call)) return;
    for (uint64_t at = 0; at < total; at += most) {
        uint64_t n = total - at < most ? total - at : most;
        put_piece(call, at, n);
        if (!nccl_wait_step(call->comm)) return;
        take_piece(call, at, n, total);
        if (!nccl_wait_step(call->comm)) return;
    }
}

/* Sends and receives */

static void compare_mail(const struct call *call, const struct mailbox *mail) {
    if (call->moved || (mail->count == call->count && mail->dtype == call->dtype)) return;
    char text[160];
    snprintf(text, sizeof text,
             "rank %d sends count %lu type %d; rank %d receives count %lu type %d", call->peer,
             (unsigned long)mail->count, mail->dtype, call->comm->rank, (unsigned long)call->count,
             call->dtype);
    struct fake_site there = mail->site;
    there.call = "ncclSend";
    there.from = NULL;
    fake_cuda_report("mismatch", &there, &call->site, text);
    call->comm->state = ncclInvalidUsage;
    call->comm->ended = 1;
}

/* Move one piece, if the mailbox allows. Return whether something was moved. */
static int move_piece(struct call *call) {
    ncclComm_t comm = call->comm;
    int sends = call->kind == SEND;
    struct mailbox *mail = sends ? &comm->shared->mail[comm->rank][call->peer]
                                 : &comm->shared->mail[call->peer][comm->rank];
    uint64_t left = call->count * nccl_size(call->dtype) - call->moved,
             n = left < PIECE ? left : PIECE;
    if (atomic_load(&mail->full) == sends) return 0;
    if (sends) {
        mail->count = call->count;
        mail->dtype = call->dtype;
        mail->site = call->site;
        memcpy(mail->data, call->send + call->moved, n);
    } else {
        compare_mail(call, mail);
        if (comm->ended) return 0;
        memcpy(call->recv + call->moved, mail->data, n);
    }
    atomic_store(&mail->full, sends);
    call->moved += n;
    call->done = n == left;
    return 1;
}

/* An earlier call of the same direction and peer goes first. */
static int is_next(const struct call *first, const struct call *call) {
    for (const struct call *each = first; each != call; each = each->next) {
        if (!each->done && each->kind == call->kind && each->peer == call->peer) return 0;
    }
    return 1;
}

static void run_exchange(struct call *first) {
    for (int left = 1; left && !first->comm->ended;) {
        int moved = left = 0;
        for (struct call *each = first; each; each = each->next) {
            if (!each->done && is_next(first, each)) moved |= move_piece(each);
            left |= !each->done;
        }
        if (left && !moved) usleep(50);
    }
}

/* Work on streams */

static int is_exchange(const struct call *call) { return call->kind == SEND || call->kind == RECV; }

static int add_range(struct fake_range *ranges, const void *address, uint64_t count, size_t size,
                     int writes) {
    *ranges = (struct fake_range){(uint64_t)address, count * size, writes, 0};
    return 1;
}

static int declare_call(const struct call *call, struct fake_range *ranges) {
    uint64_t n = (uint64_t)call->comm->n, count = call->count;
    size_t size = nccl_size(call->dtype);
    int is_root = call->comm->rank == call->peer, used = 0;
    switch (call->kind) {
    case SEND: return add_range(ranges, call->send, count, size, 0);
    case RECV: return add_range(ranges, call->recv, count, size, 1);
    case BROADCAST:
        if (is_root) used = add_range(ranges, call->send, count, size, 0);
        return used + add_range(ranges + used, call->recv, count, size, 1);
    case REDUCE:
        used = add_range(ranges, call->send, count, size, 0);
        return is_root ? used + add_range(ranges + used, call->recv, count, size, 1) : used;
    default:
        used = add_range(ranges, call->send, call->kind == REDUCE_SCATTER ? count * n : count, size,
                         0);
        return used + add_range(ranges + used, call->recv,
                                call->kind == ALL_GATHER ? count * n : count, size, 1);
    }
}

static int declare_work(void *argument, struct fake_range *ranges, int most) {
    int used = 0;
    for (struct call *each = argument; each && used + 2 <= most; each = each->next)
        used += declare_call(each, ranges + used);
    return used;
}

static int still_hangs(const struct call *call) {
    return call->hangs && !call->comm->ended && nccl_faults(call->comm->rank).hang_at;
}

static void run_work(void *argument) {
    struct call *first = argument;
    while (still_hangs(first)) usleep(200);
    if (first->comm->ended) return;
    if (is_exchange(first))
        run_exchange(first);
    else
        run_collective(first);
}

static void release_work(void *argument) {
    struct call *first = argument;
    atomic_fetch_sub(&first->comm->queued, 1);
    while (first) {
        struct call *next = first->next;
        free(first);
        first = next;
    }
}

/* Queue one collective, or a list of sends and receives of one communicator. */
ncclResult_t nccl_queue(struct call *calls) {
    struct fake_item work = {
        .declare = declare_work, .run = run_work, .release = release_work, .argument = calls};
    ncclComm_t comm = calls->comm;
    struct fake_site site = calls->site;
    CUstream stream = calls->stream;
    atomic_fetch_add(&comm->queued, 1);
    CUresult result = fake_cuda_work(stream, &site, &work);
    return result == CUDA_SUCCESS ? ncclSuccess : ncclUnhandledCudaError;
}

/* Groups */

ncclResult_t ncclGroupStart(void) {
    fake_cuda_called(__func__, __builtin_return_address(0));
    if (!group_depth++) group_result = ncclSuccess;
    return ncclSuccess;
}

/* Take the sends and receives of first's communicator out of the list. */
static struct call *take_exchange(struct call **rest, ncclComm_t comm) {
    struct call *taken = NULL, **end = &taken;
    while (*rest) {
        struct call *each = *rest;
        if (each->comm == comm && is_exchange(each)) {
            *rest = each->next;
            each->next = NULL;
            *end = each;
            end = &each->next;
        } else {
            rest = &each->next;
        }
    }
    return taken;
}

static ncclResult_t queue_all(void) {
    ncclResult_t result = group_result;
    struct call *rest = group_first;
    group_first = group_last = NULL;
    while (rest) {
        struct call *first = rest;
        if (is_exchange(first)) {
            first = take_exchange(&rest, first->comm);
        } else {
            rest = first->next;
            first->next = NULL;
        }
        ncclResult_t queued = nccl_queue(first);
        if (!result) result = queued;
    }
    return result;
}

ncclResult_t ncclGroupEnd(void) {
    fake_cuda_called(__func__, __builtin_return_address(0));
    if (!group_depth) return ncclInvalidUsage;
    return --group_depth ? ncclSuccess : queue_all();
}

/* Apply the faults of this call, and queue it, at once or at the end of its group. */
static ncclResult_t submit(struct call *call) {
    ncclComm_t comm = call->comm;
    struct faults faults = nccl_faults(comm->rank);
    long number = nccl_count_collective(comm->rank);
    if (number && number == faults.error_at) {
        free(call);
        return group_depth ? group_result = faults.error : faults.error;
    }
    if (number && number == faults.async_at) comm->state = faults.async;
    call->hangs = number && number == faults.hang_at;
    if (group_depth) {
        if (group_last)
            group_last->next = call;
        else
            group_first = call;
        group_last = call;
        return ncclSuccess;
    }
    ncclResult_t result = nccl_queue(call);
    if (result || comm->blocking || !faults.polls) return result;
    comm->state = ncclInProgress;
    comm->polls = faults.polls;
    return ncclInProgress;
}

static ncclResult_t collective(struct call given, const char *name, void *from) {
    ncclResult_t result = nccl_enter(given.comm, name, from, 0, &given.site);
    if (result) return result;
    int lacks_op = is_reduction(given.kind) &&
                   (given.op < 0 || given.op >= FIRST_FACTOR + given.comm->n_factors);
    int n_peers = given.comm->n;
    if (!nccl_size(given.dtype) || lacks_op || given.peer < 0 || given.peer >= n_peers) {
        result = ncclInvalidArgument;
    } else {
        struct call *call = malloc(sizeof *call);
        *call = given;
        result = submit(call);
    }
    nccl_leave(given.comm);
    return result;
}

#define COLLECTIVE(...)                                                                   \
    collective(                                                                           \
        (struct call){                                                                    \
            .comm = comm, .count = count, .dtype = dtype, .stream = stream, __VA_ARGS__}, \
        __func__, __builtin_return_address(0))

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, int dtype, int op,
                           ncclComm_t comm, CUstream stream) {
    return COLLECTIVE(.kind = ALL_REDUCE, .send = send, .recv = recv, .op = op);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, int dtype, int root,
                           ncclComm_t comm, CUstream stream) {
    return COLLECTIVE(.kind = BROADCAST, .send = send, .recv = recv, .peer = root);
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, int dtype, int op, int root,
                        ncclComm_t comm, CUstream stream) {
    return COLLECTIVE(.kind = REDUCE, .send = send, .recv = recv, .op = op, .peer = root);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, int dtype, ncclComm_t comm,
                           CUstream stream) {
    return COLLECTIVE(.kind = ALL_GATHER, .send = send, .recv = recv);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, int dtype, int op,
                               ncclComm_t comm, CUstream stream) {
    return COLLECTIVE(.kind = REDUCE_SCATTER, .send = send, .recv = recv, .op = op);
}

ncclResult_t ncclSend(const void *send, size_t count, int dtype, int peer, ncclComm_t comm,
                      CUstream stream) {
    return COLLECTIVE(.kind = SEND, .send = send, .peer = peer);
}

ncclResult_t ncclRecv(void *recv, size_t count, int dtype, int peer, ncclComm_t comm,
                      CUstream stream) {
    return COLLECTIVE(.kind = RECV, .recv = recv, .peer = peer);
}
