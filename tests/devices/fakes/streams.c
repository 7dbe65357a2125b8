/* Streams, events, captures and the worker of each stream. fake_cuda.h states the invariants.
 *
 * Each stream has a thread. Before some items it pauses; FAKE_CUDA_SEED chooses which, and how long. So work that no event
 * orders runs in another order with another seed.
 */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct fake_event {
    struct fake_event *next;
    int alive, timed, captured;
    struct fake_site recorded, destroyed;
    struct fake_mark *mark;
};

_Thread_local int fake_capture_mode; /* CU_STREAM_CAPTURE_MODE_GLOBAL */
struct fake_stream *fake_streams;
static struct fake_event *events;
static uint64_t seed;
static int blocking_is_forbidden;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void drop_mark(struct fake_mark *mark) {
    if (mark && --mark->references == 0) free(mark);
}

static struct fake_mark *keep_mark(struct fake_mark *mark) {
    if (mark) mark->references++;
    return mark;
}

void fake_cuda_seed(uint64_t new_seed) { seed = new_seed; }

void fake_cuda_forbid_blocking(int forbidden) { blocking_is_forbidden = forbidden; }

__attribute__((constructor)) static void read_environment(void) {
    const char *given = getenv("FAKE_CUDA_SEED");
    seed = given ? strtoull(given, NULL, 10) : 1;
    blocking_is_forbidden = getenv("FAKE_CUDA_FORBID_BLOCKING") != NULL;
}

/* Report a call by which the host waits for a mark, if that is forbidden. */
void fake_blocks(const struct fake_site *site, const struct fake_mark *mark) {
    if (!blocking_is_forbidden || !mark) return;
    fake_report("blocking", &mark->site, site, "the host waits for the device");
}

/* Return the mark of work that has not ended; NULL if there is none. */
struct fake_mark *fake_busy_mark(void) {
    for (struct fake_stream *each = fake_streams; each; each = each->next) {
        if (each->latest && !each->latest->done) return each->latest;
    }
    return NULL;
}

/* Wait up to ms until no stream has work; return whether this is so. */
int fake_cuda_drain(int ms) {
    for (int k = 0; k <= ms; k++) {
        pthread_mutex_lock(&fake_lock);
        int busy = fake_busy_mark() != NULL;
        pthread_mutex_unlock(&fake_lock);
        if (!busy) return 1;
        usleep(1000);
    }
    return 0;
}

/* Workers */

static void pause_by_seed(struct fake_stream *stream) {
    stream->random ^= stream->random << 13;
    stream->random ^= stream->random >> 7;
    stream->random ^= stream->random << 17;
    if (stream->random % 4) return;
    unsigned us = (unsigned)(stream->random >> 8) % 400;
    pthread_mutex_unlock(&fake_lock);
    usleep(us);
    pthread_mutex_lock(&fake_lock);
}

static void check_accesses(struct fake_stream *stream, struct fake_item *item) {
    static struct fake_range declared[FAKE_RANGES];
    for (int k = 0; k < item->n_ranges; k++)
        fake_check_item(item, &item->ranges[k], stream->component);
    if (item->declare) {
        int n = item->declare(item->argument, declared, FAKE_RANGES);
        for (int k = 0; k < n; k++) fake_check_item(item, &declared[k], stream->component);
    }
    if (item->frees) fake_free_at(item, stream->component);
}

static void finish(struct fake_stream *stream, struct fake_item *item) {
    item->mark->done = 1;
    item->mark->ns = now_ns();
    drop_mark(item->mark);
    stream->busy = 0;
    if (item->release) item->release(item->argument);
    free(item);
    pthread_cond_broadcast(&fake_changed);
}

static void *work(void *argument) {
    struct fake_stream *stream = argument;
    pthread_mutex_lock(&fake_lock);
    while (stream->alive || stream->first) {
        struct fake_item *item = stream->first;
        if (!item) {
            pthread_cond_wait(&fake_changed, &fake_lock);
            continue;
        }
        stream->first = item->next;
        stream->busy = 1;
        for (int k = 0; k < item->n_waits; k++) {
            while (!item->waits[k]->done) pthread_cond_wait(&fake_changed, &fake_lock);
            drop_mark(item->waits[k]);
        }
        pause_by_seed(stream);
        check_accesses(stream, item);
        if (item->run) {
            pthread_mutex_unlock(&fake_lock);
            item->run(item->argument);
            pthread_mutex_lock(&fake_lock);
        }
        finish(stream, item);
    }
    fake_end_component(stream->component);
    pthread_mutex_unlock(&fake_lock);
    return NULL;
}

/* Streams */

static struct fake_stream *make_stream(CUcontext context, int non_blocking) {
    struct fake_stream *made = calloc(1, sizeof *made);
    pthread_t thread;
    made->context = context;
    made->non_blocking = non_blocking;
    made->alive = 1;
    made->component = fake_new_component();
    made->random = (seed + 1) * 0x9E3779B97F4A7C15u +
                   (uint64_t)(made->component + 1) * 0xBF58476D1CE4E5B9u;
    made->next = fake_streams;
    fake_streams = made;
    if (pthread_create(&thread, NULL, work, made)) abort();
    pthread_detach(thread);
    return made;
}

/* Handles 0 and 1 are the legacy stream of the current context. */
struct fake_stream *fake_find_stream(CUstream handle, const struct fake_site *site) {
    CUcontext current = fake_current();
    if (!current) return NULL;
    if ((uintptr_t)handle <= 1) {
        if (!current->legacy) current->legacy = make_stream(current, 0);
        return current->legacy;
    }
    for (struct fake_stream *each = fake_streams; each; each = each->next) {
        if (each != handle) continue;
        if (!each->alive)
            fake_report("destroyed-handle", NULL, site, "the stream has been destroyed");
        return each->alive && each->context == current ? each : NULL;
    }
    return NULL;
}

struct fake_item *fake_new_item(const struct fake_site *site) {
    struct fake_item *made = calloc(1, sizeof *made);
    made->site = *site;
    return made;
}

static void wait_for(struct fake_stream *stream, struct fake_item *item, struct fake_mark *mark) {
    if (!mark) return;
    fake_join(&stream->clock, &mark->clock);
    if (!mark->done && item->n_waits < 64) item->waits[item->n_waits++] = keep_mark(mark);
}

/* The legacy stream waits for all blocking streams, and they for it. */
static void order_with_legacy(struct fake_stream *stream, struct fake_item *item) {
    struct fake_stream *legacy = stream->context->legacy;
    if (!legacy || stream->non_blocking) return;
    if (stream != legacy) {
        wait_for(stream, item, legacy->latest);
        return;
    }
    for (struct fake_stream *each = fake_streams; each; each = each->next) {
        if (each != stream && each->context == stream->context && !each->non_blocking)
            wait_for(stream, item, each->latest);
    }
}

/* Queue an item; a capturing stream only takes note of it, and it never runs. */
CUresult fake_queue(struct fake_stream *stream, struct fake_item *item) {
    if (stream->capture) {
        if (item->release) item->release(item->argument);
        free(item);
        return stream->capture == 1 ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    fake_join(&stream->clock, fake_host_clock());
    order_with_legacy(stream, item);
    stream->clock.at[stream->component] = fake_tick(stream->component);
    item->clock = stream->clock;
    item->mark = calloc(1, sizeof *item->mark);
    item->mark->references = 2;
    item->mark->clock = stream->clock;
    item->mark->site = item->site;
    drop_mark(stream->latest);
    stream->latest = item->mark;
    if (stream->first)
        stream->last->next = item;
    else
        stream->first = item;
    stream->last = item;
    pthread_cond_broadcast(&fake_changed);
    return CUDA_SUCCESS;
}

/* Wait for a mark, and let the host know what was before it. */
void fake_wait_mark(struct fake_mark *mark) {
    if (!keep_mark(mark)) return;
    while (!mark->done) pthread_cond_wait(&fake_changed, &fake_lock);
    fake_join(fake_host_clock(), &mark->clock);
    drop_mark(mark);
}

/* Queue work of the fake NCCL or of a test: declare, run, release and argument are taken from the item.
 * The argument is released in every case. */
CUresult fake_cuda_work(CUstream handle, const struct fake_site *site,
                        const struct fake_item *work) {
    pthread_mutex_lock(&fake_lock);
    struct fake_stream *stream = fake_find_stream(handle, site);
    if (!stream) {
        work->release(work->argument);
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    }
    struct fake_item *item = fake_new_item(site);
    item->declare = work->declare;
    item->run = work->run;
    item->release = work->release;
    item->argument = work->argument;
    return fake_leave(fake_queue(stream, item));
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    ENTER();
    (void)priority;
    if (!fake_current()) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    *stream = make_stream(fake_current(), flags & 1);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream || stream == stream->context->legacy) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    stream->alive = 0;
    pthread_cond_broadcast(&fake_changed);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuStreamQuery(CUstream handle) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (fake_illegal_in_capture(&site, stream))
        return fake_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream->latest && !stream->latest->done) return fake_leave(CUDA_ERROR_NOT_READY);
    if (stream->latest) fake_join(fake_host_clock(), &stream->latest->clock);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream handle) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (fake_illegal_in_capture(&site, stream))
        return fake_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    fake_blocks(&site, stream->latest);
    fake_wait_mark(stream->latest);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    struct fake_site site = ENTER();
    CUcontext current = fake_current();
    if (!current) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (fake_illegal_in_capture(&site, NULL))
        return fake_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    fake_blocks(&site, fake_busy_mark());
    for (struct fake_stream *each = fake_streams; each; each = each->next) {
        if (each->context == current) fake_wait_mark(each->latest);
    }
    return fake_leave(CUDA_SUCCESS);
}

/* Captures */

/* Report a call that a capture forbids, and invalidate the captures: all of global mode, that of the stream, that of the thread. */
int fake_illegal_in_capture(const struct fake_site *site, const struct fake_stream *stream) {
    const struct fake_stream *illegal = NULL;
    for (struct fake_stream *each = fake_streams; each; each = each->next) {
        if (each->capture != 1) continue;
        int by_global = fake_capture_mode == 0 && each->capture_mode == 0;
        int by_thread = fake_capture_mode < 2 && each->capture_mode < 2 &&
                        pthread_equal(each->capturer, pthread_self());
        if (each == stream || by_global || by_thread) {
            each->capture = 2;
            illegal = each;
        }
    }
    if (illegal)
        fake_report("illegal-in-capture", &illegal->capture_site, site,
                    "the call invalidates a capture");
    return illegal != NULL;
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER();
    int old = fake_capture_mode;
    if (*mode < 0 || *mode > 2) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    fake_capture_mode = *mode;
    *mode = old;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuStreamIsCapturing(CUstream handle, int *status) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    *status = stream->capture;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream || stream == stream->context->legacy || stream->capture)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    stream->capture = 1;
    stream->capture_mode = mode;
    stream->capturer = pthread_self();
    stream->capture_site = site;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuStreamEndCapture(CUstream handle, void **graph) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream || !stream->capture) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    int invalidated = stream->capture == 2;
    stream->capture = 0;
    *graph = NULL;
    return fake_leave(invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
}

/* Events */

static struct fake_event *find_event(CUevent handle, const struct fake_site *site) {
    for (struct fake_event *each = events; each; each = each->next) {
        if (each != handle) continue;
        if (!each->alive)
            fake_report("destroyed-handle", &each->destroyed, site, "the event has been destroyed");
        return each->alive ? each : NULL;
    }
    return NULL;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER();
    if (!fake_current()) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    struct fake_event *made = calloc(1, sizeof *made);
    made->alive = 1;
    made->timed = !(flags & 2);
    made->next = events;
    events = made;
    *event = made;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent handle) {
    struct fake_site site = ENTER();
    struct fake_event *event = find_event(handle, &site);
    if (!event) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    event->alive = 0;
    event->destroyed = site;
    drop_mark(event->mark);
    event->mark = NULL;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    struct fake_site site = ENTER();
    struct fake_event *event = find_event(handle, &site);
    struct fake_stream *stream = fake_find_stream(stream_handle, &site);
    if (!event || !stream) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    event->captured = stream->capture != 0;
    event->recorded = site;
    CUresult result = fake_queue(stream, fake_new_item(&site));
    drop_mark(event->mark);
    event->mark = event->captured ? NULL : keep_mark(stream->latest);
    return fake_leave(result);
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
    struct fake_site site = ENTER();
    struct fake_event *event = find_event(handle, &site);
    struct fake_stream *stream = fake_find_stream(stream_handle, &site);
    (void)flags;
    if (!event || !stream) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (event->captured != (stream->capture != 0)) {
        fake_report("illegal-in-capture", &event->recorded, &site,
                    "the wait joins captured work and other work");
        if (stream->capture) stream->capture = 2;
        return fake_leave(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    struct fake_item *item = fake_new_item(&site);
    wait_for(stream, item, event->mark);
    return fake_leave(fake_queue(stream, item));
}

CUresult cuEventQuery(CUevent handle) {
    struct fake_site site = ENTER();
    struct fake_event *event = find_event(handle, &site);
    if (!event) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (fake_illegal_in_capture(&site, NULL))
        return fake_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (event->mark && !event->mark->done) return fake_leave(CUDA_ERROR_NOT_READY);
    if (event->mark) fake_join(fake_host_clock(), &event->mark->clock);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent handle) {
    struct fake_site site = ENTER();
    struct fake_event *event = find_event(handle, &site);
    if (!event) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (fake_illegal_in_capture(&site, NULL))
        return fake_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    fake_blocks(&site, event->mark);
    fake_wait_mark(event->mark);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuEventElapsedTime(float *ms, CUevent start_handle, CUevent end_handle) {
    struct fake_site site = ENTER();
    struct fake_event *start = find_event(start_handle, &site),
                      *end = find_event(end_handle, &site);
    if (!start || !end || !start->timed || !end->timed || !start->mark || !end->mark) {
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    }
    if (!start->mark->done || !end->mark->done) return fake_leave(CUDA_ERROR_NOT_READY);
    *ms = (float)((double)(int64_t)(end->mark->ns - start->mark->ns) / 1e6);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
    return cuEventElapsedTime(ms, start, end);
}
