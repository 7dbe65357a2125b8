/* Usage: races SCENARIO RANKS ROUNDS SEED. Exits with 0, or prints the error that a rank found. */
#include "races.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t mixed(uint64_t key) { /* splitmix64, by S. Vigna */
    key += 0x9e3779b97f4a7c15u;
    key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9u;
    key = (key ^ key >> 27) * 0x94d049bb133111ebu;
    return key ^ key >> 31;
}

uint64_t roll(dice *d, uint64_t n) {
    d->state += 0x9e3779b97f4a7c15u;
    return mixed(d->state) % n;
}

dice dice_of(uint64_t seed, uint64_t who) { return (dice){mixed(seed * 1000003 + who)}; }

void linger(dice *d) {
    uint64_t what = roll(d, 64);
    if (what < 4) sched_yield();
    if (what == 4) pyhvd_nap((int64_t)roll(d, 300000));
    if (what > 60)
        for (uint64_t k = roll(d, 200); k; k--) pyhvd_pause();
}

void *make(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, PYHVD_LINE, bytes)) fail("no memory");
    return memset(memory, 0, bytes);
}

void fail(const char *format, ...) {
    char line[256];
    va_list more;
    va_start(more, format);
    vsnprintf(line, sizeof line, format, more);
    va_end(more);
    fprintf(stderr, "races: %s\n", line);
    fflush(stderr);
    _exit(3);
}

void start_thread(pthread_t *thread, void *(*run)(void *), void *what) {
    if (pthread_create(thread, NULL, run, what)) fail("no thread");
}

typedef struct {
    int rank;
    void (*run)(int rank, void *what);
    void *what;
} part;

static void *run_part(void *what) {
    part *p = what;
    p->run(p->rank, p->what);
    return NULL;
}

void play(int size, void (*rank)(int rank, void *what), void *what) {
    pthread_t threads[MOST_RANKS];
    part parts[MOST_RANKS];
    for (int r = 0; r < size; r++) {
        parts[r] = (part){r, rank, what};
        start_thread(&threads[r], run_part, &parts[r]);
    }
    for (int r = 0; r < size; r++) pthread_join(threads[r], NULL);
}

void make_areas(uint8_t **areas, int size, size_t capacity) {
    for (int r = 0; r < size; r++) areas[r] = make(pyhvd_window_area(capacity, PYHVD_ACROSS_SLOTS));
}

void look_at(pyhvd_window *w, uint8_t *const *areas, int rank, int size, size_t capacity,
             size_t chunk) {
    memset(w, 0, sizeof *w);
    w->rank = rank;
    w->size = size;
    w->slots = PYHVD_SLOTS;
    w->capacity = capacity;
    w->chunk = chunk;
    for (int r = 0; r < size; r++) w->area[r] = areas[r];
    pyhvd_window_clear(w);
}

size_t write_note(uint8_t *note, int rank, uint64_t which) {
    size_t bytes = 1 + mixed(which + (uint64_t)rank) % PYHVD_NOTE;
    for (size_t k = 0; k < bytes; k++)
        note[k] = (uint8_t)mixed(which * MOST_RANKS + (uint64_t)rank + k / 64);
    return bytes;
}

int is_note(const uint8_t *note, size_t bytes, int rank, uint64_t which) {
    uint8_t expected[PYHVD_NOTE];
    return write_note(expected, rank, which) == bytes && !memcmp(note, expected, bytes);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*play)(const terms *);
    } scenarios[] = {
        {"windows", play_windows}, {"aborts", play_aborts},           {"table", play_table},
        {"paths", play_paths},     {"path-aborts", play_path_aborts}, {"calls", play_calls},
        {"hosts", play_hosts},     {"agreements", play_agreements},   {"ids", play_ids},
        {"turns", play_turns}};
    if (argc != 5) fail("usage: races SCENARIO RANKS ROUNDS SEED");
    terms t = {atoi(argv[2]), atoi(argv[3]), strtoull(argv[4], NULL, 10)};
    if (t.size < 1 || t.size > MOST_RANKS) fail("1 to %d ranks", MOST_RANKS);
    for (size_t k = 0; k < sizeof scenarios / sizeof *scenarios; k++) {
        if (strcmp(scenarios[k].name, argv[1])) continue;
        scenarios[k].play(&t);
        printf("%s: %d ranks, %d rounds\n", argv[1], t.size, t.rounds);
        return 0;
    }
    fail("no scenario %s", argv[1]);
}
