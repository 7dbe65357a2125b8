/* Callbacks at the end of a turn. In every other turn, the submitter polls for the end and at once
 * submits the next turn, at whose end the background thread is to be woken; the thread that ended
 * the turn before may still be running. Each rank is alone in a ready table of its own, so that no
 * other wake-up makes up for a lost one. */
#include "races.h"

#include <stdlib.h>

#include "fast_path/progress.h"
#include "kernels/kernels.h"

#define SLOTS 64
#define LOST 10000000000 /* ns */

typedef struct {
    const terms *t;
    pyhvd_fast_path path;
    pyhvd_window window;
    pyhvd_call call;
    uint32_t slot;
    uint64_t version;
    int64_t value;
    _Atomic uint64_t called; /* the last turn that had ended when the background thread was woken */
    _Atomic uint32_t over;
} end;

static void *run_background(void *what) {
    end *e = what;
    while (!atomic_load(&e->over))
        if (pyhvd_fast_path_sleep(&e->path, -1) & PYHVD_WAKE_DONE)
            atomic_store(&e->called, atomic_load(&e->call.finished));
    return NULL;
}

static uint64_t submit(end *e) {
    pthread_mutex_lock(&e->path.submissions.mutex);
    if (!pyhvd_fast_path_hold(&e->path, &e->call)) fail("no memory");
    uint64_t turn = e->call.started;
    pthread_mutex_unlock(&e->path.submissions.mutex);
    return turn;
}

static void use(int rank, void *what) {
    end *e = make(sizeof *e);
    uint32_t alone = 0;
    uint8_t *area;
    pthread_t background;
    e->t = what;
    make_areas(&area, 1, PYHVD_FLAT);
    look_at(&e->window, &area, 0, 1, PYHVD_FLAT, PYHVD_FLAT);
    void *base = make(pyhvd_ready_table_bytes(1, SLOTS));
    pyhvd_ready_table_attach(&e->path.setup.table, base, 0, 1, SLOTS);
    e->path.progress.threshold = 1 << 16;
    e->version = 1;
    if (!pyhvd_fast_path_init(&e->path) || !pyhvd_fast_path_open(&e->path, 0, &e->window))
        fail("no memory");
    pyhvd_ready_table_open_set(&e->path.setup.table, 0, &alone, 1, 0);
    pyhvd_ready_table_delegate(&e->path.setup.table, 0, e->slot, e->version);
    e->call = (pyhvd_call){.slots = {.n = 1, .ids = &e->slot, .versions = &e->version}, .owner = e};
    e->call.srcs = e->call.single_addresses, e->call.dsts = e->call.single_addresses + 1;
    e->call.single_addresses[0] = e->call.single_addresses[1] = (int64_t)(intptr_t)&e->value;
    e->path.setup.sets[0].tensors[e->slot] = (pyhvd_cached_tensor){.call = &e->call,
                                                                   .count = 1,
                                                                   .prescale = 1,
                                                                   .postscale = 1,
                                                                   .dtype = PYHVD_INT64,
                                                                   .op = PYHVD_SUM};
    start_thread(&background, run_background, e);
    for (int k = 0; k < e->t->rounds; k++) {
        uint64_t turn = submit(e);
        pyhvd_fast_path_flush(&e->path, 1, pyhvd_now());
        pyhvd_fast_path_ring(&e->path);
        while (!pyhvd_call_finished(&e->call, turn)) pyhvd_pause();
        /* before the submission, so that it comes at once */
        int ended = pyhvd_call_notify(&e->call, turn + 1);
        turn = submit(e);
        pyhvd_fast_path_ring(&e->path);
        for (int64_t until = pyhvd_after(LOST); !ended && atomic_load(&e->called) < turn;
             sched_yield())
            if (pyhvd_now() > until)
                fail("rank %d: no wake-up at the end of turn %d", rank, (int)turn);
        while (!pyhvd_call_finished(&e->call, turn)) sched_yield();
    }
    atomic_store(&e->over, 1);
    pyhvd_ready_table_wake(&e->path.setup.table, 0, PYHVD_WAKE_WORK);
    pthread_join(background, NULL);
    pyhvd_fast_path_free(&e->path);
    free(area), free(base), free(e);
}

void play_calls(const terms *t) { play(t->size, use, (void *)t); }
