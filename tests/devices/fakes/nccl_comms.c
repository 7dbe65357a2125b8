/* Communicators: connect, split, errors, abort, and the faults that tests ask for. fake_nccl.h states the invariants. */
#define _GNU_SOURCE
#include "fake_nccl.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

pthread_mutex_t comms_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_comm *comms;
static struct faults faults = {.rank = -1};
static long n_collectives;

/* Faults */

/* Set the faults; "" lifts all. Words, separated by commas; N counts collectives from here on:
 *   rank=R        the faults concern rank R alone, and N counts its collectives; else those of the process
 *   error@N=CODE  call N returns CODE
 *   hang@N        collective N never ends
 *   async@N=CODE  from call N on this is the asynchronous error
 *   id=CODE       ncclGetUniqueId returns CODE
 *   init=CODE     ncclCommInitRankConfig returns CODE
 *   connect       connecting never ends
 *   abort         an abort waits for the device
 *   slow=MS       each call takes so long
 *   progress=K    a call on a non-blocking communicator is in progress for K polls
 */
void fake_nccl_fault(const char *text) {
    struct faults set = {.rank = -1};
    char copy[256], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        if (sscanf(word, "error@%ld=%d", &set.error_at, &set.error) == 2) continue;
        if (sscanf(word, "async@%ld=%d", &set.async_at, &set.async) == 2) continue;
        if (sscanf(word, "hang@%ld", &set.hang_at) == 1) continue;
        if (sscanf(word, "rank=%d", &set.rank) == 1) continue;
        if (sscanf(word, "id=%d", &set.id) == 1) continue;
        if (sscanf(word, "init=%d", &set.init) == 1) continue;
        if (sscanf(word, "slow=%d", &set.slow_ms) == 1) continue;
        if (sscanf(word, "progress=%d", &set.polls) == 1) continue;
        if (!strcmp(word, "connect"))
            set.connect = 1;
        else if (!strcmp(word, "abort"))
            set.abort = 1;
        else
            fprintf(stderr, "fake NCCL: unknown fault %s\n", word);
    }
    pthread_mutex_lock(&comms_lock);
    faults = set;
    n_collectives = 0;
    pthread_mutex_unlock(&comms_lock);
}

__attribute__((constructor)) static void read_environment(void) {
    const char *given = getenv("FAKE_NCCL_FAULTS");
    if (given) fake_nccl_fault(given);
}

/* The faults that concern a rank; all that are set for rank -1. */
struct faults nccl_faults(int rank) {
    static const struct faults none = {.rank = -1};
    pthread_mutex_lock(&comms_lock);
    struct faults copy = rank < 0 || faults.rank < 0 || faults.rank == rank ? faults : none;
    pthread_mutex_unlock(&comms_lock);
    return copy;
}

/* Count a collective of a rank; 0 if the faults do not concern this rank. */
long nccl_count_collective(int rank) {
    pthread_mutex_lock(&comms_lock);
    long number = faults.rank < 0 || faults.rank == rank ? ++n_collectives : 0;
    pthread_mutex_unlock(&comms_lock);
    return number;
}

/* Calls */

static int is_known(ncclComm_t comm) {
    for (struct fake_comm *each = comms; each; each = each->next) {
        if (each == comm) return 1;
    }
    return 0;
}

static ncclResult_t refuse(ncclComm_t comm, int allowed_states, const struct fake_site *site) {
    if (!is_known(comm)) return ncclInvalidArgument;
    if (comm->aborting || comm->aborted) {
        fake_cuda_report(comm->aborted ? "call-after-abort" : "call-inside-abort", &comm->end_site,
                         site, "the communicator is being aborted, or was");
        return ncclInvalidArgument;
    }
    if (comm->destroyed) {
        fake_cuda_report("call-after-destroy", &comm->end_site, site,
                         "the communicator has been destroyed");
        return ncclInvalidArgument;
    }
    if (comm->revoked && !(allowed_states & AFTER_REVOKE)) {
        fake_cuda_report("call-after-revoke", &comm->end_site, site,
                         "the communicator has been revoked");
        return ncclInvalidUsage;
    }
    if (comm->state == ncclInProgress && !(allowed_states & BEFORE_CONNECTED)) {
        fake_cuda_report("call-in-progress", &comm->last_site, site,
                         "an earlier call is still in progress");
        return ncclInvalidArgument;
    }
    return ncclSuccess;
}

/* Begin a call on a communicator; report it if the communicator's state forbids it. */
ncclResult_t nccl_enter(ncclComm_t comm, const char *call, void *from, int allowed_states,
                        struct fake_site *site) {
    *site = fake_cuda_called(call, from);
    pthread_mutex_lock(&comms_lock);
    ncclResult_t result = refuse(comm, allowed_states, site);
    int slow_ms = faults.slow_ms;
    if (!result) {
        comm->inside++;
        comm->last_site = *site;
    }
    pthread_mutex_unlock(&comms_lock);
    if (!result && slow_ms) usleep((unsigned)slow_ms * 1000);
    return result;
}

void nccl_leave(ncclComm_t comm) {
    pthread_mutex_lock(&comms_lock);
    comm->inside--;
    pthread_mutex_unlock(&comms_lock);
}

/* Connect */

struct connecting {
    ncclComm_t comm, parent;
    int number, color, key;
};

static int may_go_on(ncclComm_t comm) {
    usleep(100);
    return !comm->ended;
}

/* Map the file of the communicator, and wait until all ranks have. Return 0 if the communicator ends before. */
static ncclResult_t join(ncclComm_t comm) {
    char path[192];
    snprintf(path, sizeof path, "/dev/shm/%s", comm->name);
    while (nccl_faults(comm->rank).connect) {
        if (!may_go_on(comm)) return ncclInternalError;
    }
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared))) return ncclSystemError;
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) return ncclSystemError;
    comm->shared = shared;
    atomic_store(&shared->joined[comm->rank], 1);
    int all_joined = 1;
    for (int k = 0; k < comm->n && all_joined; k++) {
        while (all_joined && !atomic_load(&shared->joined[k])) all_joined = may_go_on(comm);
    }
    if (comm->rank == 0 || !all_joined) unlink(path);
    return all_joined ? ncclSuccess : ncclInternalError;
}

/* Exchange color and key with all ranks of the parent; set rank, size and name of the new communicator. */
static ncclResult_t find_place(struct connecting *task) {
    ncclComm_t parent = task->parent, comm = task->comm;
    struct split *splits = parent->shared->splits[task->number % SPLITS],
                 *mine = &splits[parent->rank];
    mine->color = task->color;
    mine->key = task->key;
    atomic_store(&mine->posted, task->number);
    comm->rank = comm->n = 0;
    for (int k = 0; k < parent->n; k++) {
        while (atomic_load(&splits[k].posted) < task->number) {
            if (!may_go_on(parent) || comm->ended) return ncclInternalError;
        }
        if (splits[k].color != task->color) continue;
        comm->n++;
        comm->rank += splits[k].key < task->key || (splits[k].key == task->key && k < parent->rank);
    }
    snprintf(comm->name, sizeof comm->name, "%.100s-%d-%d", parent->name, task->number,
             task->color);
    return ncclSuccess;
}

static void *connect_comm(void *argument) {
    struct connecting *task = argument;
    ncclResult_t result = task->parent ? find_place(task) : ncclSuccess;
    if (!result && task->color >= 0) result = join(task->comm);
    if (task->parent) task->parent->state = result;
    task->comm->state = result;
    free(task);
    return NULL;
}

/* Connect on a thread, or at once if the communicator is blocking. */
static ncclResult_t start(struct connecting given) {
    struct connecting *task = malloc(sizeof *task);
    pthread_t thread;
    *task = given;
    given.comm->state = ncclInProgress;
    if (given.parent) given.parent->state = ncclInProgress;
    if (given.comm->blocking) {
        connect_comm(task);
        return given.comm->state;
    }
    if (pthread_create(&thread, NULL, connect_comm, task)) return ncclSystemError;
    pthread_detach(thread);
    return ncclInProgress;
}

static ncclComm_t make_comm(int rank, int n, int blocking, const struct fake_site *site) {
    ncclComm_t made = calloc(1, sizeof *made);
    made->rank = rank;
    made->n = n;
    made->blocking = blocking;
    made->last_site = *site;
    pthread_mutex_lock(&comms_lock);
    made->next = comms;
    comms = made;
    pthread_mutex_unlock(&comms_lock);
    return made;
}

static int is_blocking(const ncclConfig_t *config) {
    return !config || config->blocking == INT_MIN || config->blocking;
}

ncclResult_t ncclGetVersion(int *version) {
    const char *given = getenv("FAKE_NCCL_VERSION");
    fake_cuda_called(__func__, __builtin_return_address(0));
    *version = given ? atoi(given) : 22807;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    unsigned char bits[16];
    fake_cuda_called(__func__, __builtin_return_address(0));
    if (nccl_faults(-1).id) return nccl_faults(-1).id;
    if (getrandom(bits, sizeof bits, 0) != sizeof bits) return ncclSystemError;
    memset(id, 0, sizeof *id);
    int at = snprintf(id->internal, sizeof id->internal, "fake-nccl-");
    for (int k = 0; k < 16; k++)
        at += snprintf(id->internal + at, sizeof id->internal - (size_t)at, "%02x", bits[k]);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    struct fake_site site = fake_cuda_called(__func__, __builtin_return_address(0));
    if (n < 1 || n > RANKS || rank < 0 || rank >= n || memcmp(id.internal, "fake-nccl-", 10))
        return ncclInvalidArgument;
    if (config && config->magic != 0xcafebeef) return ncclInvalidArgument;
    if (nccl_faults(rank).init) return nccl_faults(rank).init;
    *comm = make_comm(rank, n, is_blocking(config), &site);
    snprintf((*comm)->name, sizeof(*comm)->name, "%.127s", id.internal);
    return start((struct connecting){.comm = *comm});
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *comm,
                           ncclConfig_t *config) {
    struct fake_site site;
    ncclResult_t result = nccl_enter(parent, __func__, __builtin_return_address(0), 0, &site);
    if (result) return result;
    int blocking = config ? is_blocking(config) : parent->blocking;
    ncclComm_t made = make_comm(0, 0, blocking, &site);
    int number = ++parent->n_splits;
    *comm = color < 0 ? NULL : made;
    result = start((struct connecting){
        .comm = made, .parent = parent, .number = number, .color = color, .key = key});
    nccl_leave(parent);
    return result;
}

/* Errors */

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    struct fake_site site;
    ncclResult_t result = nccl_enter(comm, __func__, __builtin_return_address(0),
                                     BEFORE_CONNECTED | AFTER_REVOKE, &site);
    if (result) return result;
    *error = comm->state;
    pthread_mutex_lock(&comms_lock);
    if (comm->polls && !--comm->polls) comm->state = ncclSuccess;
    pthread_mutex_unlock(&comms_lock);
    nccl_leave(comm);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t code) {
    static const char *texts[] = {"no error",
                                  "unhandled cuda error",
                                  "unhandled system error",
                                  "internal error",
                                  "invalid argument",
                                  "invalid usage",
                                  "remote process exited or there was a network error",
                                  "NCCL operation in progress"};
    return code >= 0 && code <= ncclInProgress ? texts[code] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "fake NCCL: a fault of the test";
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *n) {
    struct fake_site site;
    ncclResult_t result = nccl_enter(comm, __func__, __builtin_return_address(0), 0, &site);
    if (result) return result;
    *n = comm->n;
    nccl_leave(comm);
    return ncclSuccess;
}

/* Factors */

ncclResult_t ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence,
                                      ncclComm_t comm) {
    struct fake_site site;
    ncclResult_t result = nccl_enter(comm, __func__, __builtin_return_address(0), 0, &site);
    if (result) return result;
    if (residence != 1 || dtype < FLOAT16 || dtype > BFLOAT16 || comm->n_factors == FACTORS) {
        result = ncclInvalidArgument;
    } else {
        comm->factors[comm->n_factors] = nccl_read_double(dtype, scalar);
        *op = FIRST_FACTOR + comm->n_factors++;
    }
    nccl_leave(comm);
    return result;
}

ncclResult_t ncclRedOpDestroy(int op, ncclComm_t comm) {
    struct fake_site site;
    ncclResult_t result = nccl_enter(comm, __func__, __builtin_return_address(0), 0, &site);
    if (result) return result;
    if (op < FIRST_FACTOR || op >= FIRST_FACTOR + comm->n_factors) result = ncclInvalidArgument;
    nccl_leave(comm);
    return result;
}

/* The end of a communicator */

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    struct fake_site site;
    ncclResult_t result = nccl_enter(comm, __func__, __builtin_return_address(0), AFTER_REVOKE,
                                     &site);
    if (result) return result;
    while (comm->blocking && comm->queued && !comm->ended) usleep(100);
    nccl_leave(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    struct fake_site site;
    ncclResult_t result = nccl_enter(comm, __func__, __builtin_return_address(0), AFTER_REVOKE,
                                     &site);
    if (result) return result;
    pthread_mutex_lock(&comms_lock);
    if (comm->queued && !comm->ended) {
        fake_cuda_report("destroyed-in-use", &comm->last_site, &site,
                         "work of the communicator has not ended");
    }
    comm->inside--;
    comm->destroyed = 1;
    comm->end_site = site;
    pthread_mutex_unlock(&comms_lock);
    return ncclSuccess;
}

/* Stop all work of the communicator. Its works end without a result; with the fault "abort" the call waits for them first. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    struct fake_site site = fake_cuda_called(__func__, __builtin_return_address(0));
    pthread_mutex_lock(&comms_lock);
    ncclResult_t result = refuse(comm, BEFORE_CONNECTED | AFTER_REVOKE, &site);
    if (!result && comm->inside) {
        fake_cuda_report("call-inside-abort", &comm->last_site, &site,
                         "the abort begins while a call is under way");
    }
    if (!result) {
        comm->aborting = 1;
        comm->end_site = site;
    }
    pthread_mutex_unlock(&comms_lock);
    if (result) return result;
    while (nccl_faults(comm->rank).abort && comm->queued) usleep(200);
    comm->ended = 1;
    pthread_mutex_lock(&comms_lock);
    comm->aborted = 1;
    pthread_mutex_unlock(&comms_lock);
    return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    struct fake_site site;
    (void)flags;
    ncclResult_t result = nccl_enter(comm, __func__, __builtin_return_address(0),
                                     BEFORE_CONNECTED | AFTER_REVOKE, &site);
    if (result) return result;
    if (comm->state == ncclInProgress) { /* NCCL refuses it, and the abort must go on without it. */
        nccl_leave(comm);
        return ncclInvalidArgument;
    }
    pthread_mutex_lock(&comms_lock);
    comm->revoked = 1;
    comm->end_site = site;
    comm->inside--;
    pthread_mutex_unlock(&comms_lock);
    comm->ended = 1;
    return ncclSuccess;
}
