/* Preloaded into a rank: records each call of a function that was compiled with -finstrument-functions.

   walk_ranks.py switches the recording on and off, and reads the calls. Only calls made meanwhile are kept, and
   of each function's calls on one thread the first MOST_OF_ONE: a waiting thread calls the same few all the
   time. walk_on is the number of the recording, 0 for none. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define MOST (1 << 20)
#define MOST_OF_ONE 1000
#define FUNCTIONS 4096 /* more than the extensions have */
#define HIDDEN __attribute__((no_instrument_function))

struct walk_call {
    int64_t ns; /* CLOCK_MONOTONIC, as time.monotonic_ns() */
    const void *function;
    int32_t thread;
    int32_t enters;
};

struct walk_call walk_calls[MOST];
atomic_int walk_count;
atomic_int walk_on;

struct count {
    const void *function;
    int recording;
    int calls[2]; /* exits, entries */
};

/* Count one more; return whether it is to be kept. An exit is kept where its entry was. */
static HIDDEN int counted(const void *function, int enters, int recording) {
    static _Thread_local struct count counts[FUNCTIONS];
    size_t at = ((uintptr_t)function >> 4) % FUNCTIONS;
    while (counts[at].function != NULL && counts[at].function != function) at = (at + 1) % FUNCTIONS;
    if (counts[at].recording != recording) counts[at] = (struct count){function, recording, {0, 0}};
    return counts[at].calls[enters]++ < MOST_OF_ONE;
}

static HIDDEN void record(const void *function, int enters) {
    static _Thread_local int32_t thread;
    struct timespec now;
    int recording = atomic_load_explicit(&walk_on, memory_order_acquire);
    int at;
    if (recording == 0 || !counted(function, enters, recording)) return;
    if (thread == 0) thread = gettid();
    at = atomic_fetch_add(&walk_count, 1);
    if (at >= MOST) return; /* walk_ranks.py sees it by the count */
    clock_gettime(CLOCK_MONOTONIC, &now);
    walk_calls[at] = (struct walk_call){now.tv_sec * 1000000000LL + now.tv_nsec, function, thread, enters};
}

HIDDEN void __cyg_profile_func_enter(void *function, void *caller) {
    (void)caller;
    record(function, 1);
}

HIDDEN void __cyg_profile_func_exit(void *function, void *caller) {
    (void)caller;
    record(function, 0);
}

/* Say which library a function is in, and where in it; 0: none. */
HIDDEN int walk_locate(const void *function, const char **library, uintptr_t *offset) {
    Dl_info info;
    if (!dladdr(function, &info) || info.dli_fname == NULL) return 0;
    *library = info.dli_fname;
    *offset = (uintptr_t)function - (uintptr_t)info.dli_fbase;
    return 1;
}
