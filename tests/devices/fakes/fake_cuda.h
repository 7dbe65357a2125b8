/* What the parts of the fake CUDA driver share with each other and with the fake NCCL.
 *
 * Invariants:
 * 1. One mutex, fake_lock, guards all state of the fake driver. Every entry point holds it from fake_enter() to
 *    fake_leave(). A worker holds it except while it runs the function of an item.
 * 2. A wait uses fake_changed, which is signalled after each item. So no thread holds fake_lock while it waits.
 * 3. fake_lock is taken after the fake NCCL's lock, and never before it.
 * 4. The order of an item is known when it is queued: its clock is the clock of its stream, which has joined the clocks of
 *    the host thread and of all events that the stream waits for. Its accesses are checked when it runs, as the tables of a
 *    kernel may be written by earlier items.
 * 5. Freed memory, streams and events are kept, so that a wrong use is reported and does not crash.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct fake_context *CUcontext;
typedef struct fake_stream *CUstream;
typedef struct fake_event *CUevent;
typedef struct fake_module *CUmodule;
typedef struct fake_kernel *CUfunction;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
};

enum { FAKE_CLOCKS = 128, FAKE_RANGES = 1024, FAKE_DEVICES = 8 };

/* One count for each stream and host thread. A count belongs to one of them at a time, and never decreases. */
struct fake_clock {
    uint32_t at[FAKE_CLOCKS];
};

/* Where a call came from: its name, its number in the process, the label of the thread, the address in the caller. */
struct fake_site {
    const char *call;
    void *from;
    long number;
    char label[48];
};

struct fake_range {
    uint64_t address;
    size_t bytes;
    int writes;
    int may_be_foreign; /* Plain host memory is allowed, and not checked. */
};

/* The moment after an item. Events and waiting items share it by count. */
struct fake_mark {
    struct fake_site site;
    int references;
    int done;
    uint64_t ns;
    struct fake_clock clock;
};

typedef void (*fake_function)(void *argument);
typedef int (*fake_declaration)(void *argument, struct fake_range *ranges, int most);

/* One unit of work. The worker calls declare (or uses ranges), checks the accesses, and calls run. */
struct fake_item {
    struct fake_item *next;
    struct fake_site site;
    struct fake_clock clock;
    struct fake_mark *mark;
    struct fake_mark *waits[64];
    int n_waits;
    struct fake_range ranges[8];
    int n_ranges;
    uint64_t frees;
    fake_declaration declare;
    fake_function run;
    fake_function release;
    void *argument;
};

struct fake_context {
    int device;
    int retained;
    struct fake_site made;
    CUstream legacy;
};

struct fake_stream {
    struct fake_stream *next;
    CUcontext context;
    int alive;
    int non_blocking;
    int capture; /* 0: none, 1: active, 2: invalidated */
    int capture_mode;
    pthread_t capturer;
    struct fake_site capture_site;
    int component;
    struct fake_clock clock;
    struct fake_item *first, *last;
    struct fake_mark *latest;
    int busy;
    uint64_t random;
};

extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;

/* checks.c */
struct fake_site fake_enter(const char *call, void *from);
CUresult fake_leave(CUresult result);
#define ENTER() fake_enter(__func__, __builtin_return_address(0))
void fake_report(const char *kind, const struct fake_site *first, const struct fake_site *second,
                 const char *what);
void fake_join(struct fake_clock *into, const struct fake_clock *from);
int fake_new_component(void);
void fake_end_component(int component);
uint32_t fake_tick(int component);
struct fake_clock *fake_host_clock(void);
void fake_check_item(const struct fake_item *item, const struct fake_range *range, int component);
void fake_check_host(const struct fake_site *site, const struct fake_range *range);
int fake_is_ours(uint64_t address, int *is_host);
uint64_t fake_allocate(size_t bytes, int is_host, int device, const struct fake_site *site);
int fake_free_now(uint64_t address, const struct fake_site *site);
void fake_free_at(const struct fake_item *item, int component);
int fake_device_of(uint64_t address);

/* streams.c */
extern _Thread_local int fake_capture_mode;
extern struct fake_stream *fake_streams;
struct fake_stream *fake_find_stream(CUstream handle, const struct fake_site *site);
struct fake_item *fake_new_item(const struct fake_site *site);
CUresult fake_queue(struct fake_stream *stream, struct fake_item *item);
void fake_wait_mark(struct fake_mark *mark);
int fake_illegal_in_capture(const struct fake_site *site, const struct fake_stream *stream);
void fake_blocks(const struct fake_site *site, const struct fake_mark *mark);
struct fake_mark *fake_busy_mark(void);

/* driver.c */
CUcontext fake_current(void);

/* For the fake NCCL: these take fake_lock themselves. */
struct fake_site fake_cuda_called(const char *call, void *from);
void fake_cuda_report(const char *kind, const struct fake_site *first,
                      const struct fake_site *second, const char *what);
CUresult fake_cuda_work(CUstream stream, const struct fake_site *site,
                        const struct fake_item *work);

/* For tests. */
typedef void (*fake_kernel_body)(void **parameters, unsigned blocks, unsigned threads);
typedef int (*fake_kernel_ranges)(void **parameters, struct fake_range *ranges, int most);
int fake_cuda_register_kernel(const char *name, const size_t *sizes, int n, fake_kernel_body run,
                              fake_kernel_ranges ranges);
CUresult fake_cuda_call(CUstream stream, const char *name, fake_function run, void *argument,
                        const struct fake_range *ranges, int n);
const char *fake_cuda_reports(void);
long fake_cuda_count(const char *call);
void fake_cuda_reset(void);
void fake_cuda_label(const char *label);
void fake_cuda_seed(uint64_t seed);
void fake_cuda_forbid_blocking(int forbidden);
void fake_cuda_allow_ordinal(int ordinal);
void fake_cuda_separate_hosts(int separate);
void fake_cuda_host_access(const void *address, size_t bytes, int writes);
void fake_cuda_host_release(unsigned key);
void fake_cuda_host_acquire(unsigned key);
int fake_cuda_drain(int ms);

#endif
