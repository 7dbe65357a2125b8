/* Callbacks at the end of a turn. Every other turn somebody only looks whether it has ended, and submits the next one
 * at once, of whose end the background thread is to be told: whoever has ended the turn before may still be at it.
 * Each rank is alone on a board of its own, so that no other call makes up for one that is lost. */
#include "races.h"

#include <stdlib.h>

#include "fast_path/internal.h"
#include "kernels/kernels.h"

#define SLOTS 64
#define LOST 10000000000 /* ns */

typedef struct {
    const terms *t;
    pyhvd_lane lane;
    pyhvd_window window;
    pyhvd_unit unit;
    uint32_t slot;
    uint64_t since;
    int64_t value;
    _Atomic uint64_t called; /* the last turn that had ended when the background thread was called */
    _Atomic uint32_t over;
} end;

static void *run_background(void *what) {
    end *e = what;
    while (!atomic_load(&e->over))
        if (pyhvd_lane_doze(&e->lane, -1) & PYHVD_CALL_DONE) atomic_store(&e->called, atomic_load(&e->unit.finished));
    return NULL;
}

static uint64_t submit(end *e) {
    pthread_mutex_lock(&e->lane.mutex);
    if (!pyhvd_lane_hold(&e->lane, &e->unit)) fail("no memory");
    uint64_t turn = e->unit.started;
    pthread_mutex_unlock(&e->lane.mutex);
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
    void *base = make(pyhvd_board_bytes(1, SLOTS));
    pyhvd_board_attach(&e->lane.board, base, 0, 1, SLOTS);
    e->lane.threshold = 1 << 16;
    e->since = 1;
    if (!pyhvd_lane_init(&e->lane) || !pyhvd_lane_open(&e->lane, 0, &e->window)) fail("no memory");
    pyhvd_board_open(&e->lane.board, 0, &alone, 1);
    pyhvd_board_lend(&e->lane.board, 0, e->slot, e->since);
    e->unit = (pyhvd_unit){.post = {.n = 1, .slots = &e->slot, .since = &e->since}, .owner = e};
    e->unit.srcs = e->unit.own, e->unit.dsts = e->unit.own + 1;
    e->unit.own[0] = e->unit.own[1] = (int64_t)(intptr_t)&e->value;
    e->lane.sets[0].records[e->slot] = (pyhvd_record){.unit = &e->unit, .count = 1, .prescale = 1, .postscale = 1,
                                                      .dtype = PYHVD_INT64, .op = PYHVD_SUM};
    start_thread(&background, run_background, e);
    for (int k = 0; k < e->t->rounds; k++) {
        uint64_t turn = submit(e);
        pyhvd_lane_flush(&e->lane, 1, pyhvd_now());
        pyhvd_lane_ring(&e->lane);
        while (!pyhvd_unit_finished(&e->unit, turn)) pyhvd_pause();
        int ended = pyhvd_unit_notify(&e->unit, turn + 1); /* before it is submitted, so that it comes at once */
        turn = submit(e);
        pyhvd_lane_ring(&e->lane);
        for (int64_t until = pyhvd_after(LOST); !ended && atomic_load(&e->called) < turn; sched_yield())
            if (pyhvd_now() > until) fail("rank %d: nobody was called at the end of turn %d", rank, (int)turn);
        while (!pyhvd_unit_finished(&e->unit, turn)) sched_yield();
    }
    atomic_store(&e->over, 1);
    pyhvd_board_call(&e->lane.board, 0, PYHVD_CALL_WORK);
    pthread_join(background, NULL);
    pyhvd_lane_free(&e->lane);
    free(area), free(base), free(e);
}

void play_calls(const terms *t) { play(t->size, use, (void *)t); }
