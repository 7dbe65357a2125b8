/* What the parts of the fake NCCL share.
 *
 * Invariants:
 * 1. comms_lock guards the list of communicators, the faults, and all plain fields of a communicator. It is taken before
 *    fake_lock, and held for a short time only: not during a wait.
 * 2. Atomic fields are written without a lock. A worker of a stream reads only them and fields that never change.
 * 3. The shared memory of a communicator is a file in /dev/shm, named by the unique id. Rank 0 removes the name when all
 *    ranks have joined. A slot with a rank's number is written by this rank alone.
 * 4. Ranks that run a collective proceed in steps: each rank counts its step, and waits until all ranks have reached it.
 * 5. A communicator is never released, so that a call after its end is reported and does not crash.
 */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include "fake_cuda.h"

#include <stdatomic.h>

typedef int ncclResult_t;
typedef struct fake_comm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} ncclConfig_t;

enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};

enum {
    INT8,
    UINT8,
    INT32,
    UINT32,
    INT64,
    UINT64,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT8E4M3,
    FLOAT8E5M2,
    N_DTYPES
};
enum { SUM, PROD, MAX, MIN, AVG, FIRST_FACTOR };
enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };
enum { RANKS = 8, PIECE = 32768, FACTORS = 64, SPLITS = 16 };

/* What a rank says of its collective before it runs; the others compare. */
struct announced {
    int kind, op, dtype, root;
    uint64_t count;
    double factor;
    struct fake_site site;
};

struct mailbox {
    _Atomic int full;
    int dtype;
    uint64_t count;
    struct fake_site site;
    unsigned char data[PIECE];
};

struct split {
    _Atomic int posted;
    int color, key;
};

struct shared {
    _Atomic int joined[RANKS];
    _Atomic uint64_t step[RANKS];
    struct announced announced[RANKS];
    struct split splits[SPLITS][RANKS];
    unsigned char pieces[RANKS][PIECE];
    struct mailbox mail[RANKS][RANKS];
};

struct fake_comm {
    struct fake_comm *next;
    int rank, n, blocking;
    char name[160];
    struct shared *_Atomic shared;
    _Atomic int state;  /* the asynchronous error */
    _Atomic int ended;  /* work must stop: aborted or revoked */
    _Atomic int queued; /* works that have not run */
    int aborting, aborted, revoked, destroyed;
    int inside; /* calls that are under way */
    int polls;  /* answers "in progress" that are still to give */
    int n_splits;
    struct fake_site end_site, last_site;
    double factors[FACTORS];
    int n_factors;
};

struct call {
    struct call *next;
    ncclComm_t comm;
    int kind, dtype, op, peer, hangs, done;
    const unsigned char *send;
    unsigned char *recv;
    uint64_t count, moved;
    CUstream stream;
    struct fake_site site;
};

struct faults {
    long error_at, hang_at, async_at;
    int rank, error, async, id, init, connect, abort, slow_ms, polls;
};

/* nccl_comms.c */
extern pthread_mutex_t comms_lock;
struct faults nccl_faults(int rank);
ncclResult_t nccl_enter(ncclComm_t comm, const char *call, void *from, int allowed_states,
                        struct fake_site *site);
void nccl_leave(ncclComm_t comm);
enum { BEFORE_CONNECTED = 1, AFTER_REVOKE = 2 };
long nccl_count_collective(int rank);

/* nccl_values.c */
size_t nccl_size(int dtype);
void nccl_scale(int dtype, double factor, const unsigned char *from, unsigned char *to, uint64_t n);
void nccl_combine(int dtype, int op, const unsigned char *with, unsigned char *into);
void nccl_divide(int dtype, int n, unsigned char *value);
double nccl_read_double(int dtype, const void *value);

/* nccl_work.c */
int nccl_wait_step(ncclComm_t comm);
ncclResult_t nccl_queue(struct call *calls);

/* For tests. */
void fake_nccl_fault(const char *text);

#endif
