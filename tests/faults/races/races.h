/* Ranks that are threads of one process, so that sanitizers see all that they share; what the scenarios have in
 * common.
 *
 * Every rank draws from a *plan*, which is the same on all of them, and from a *draw* of its own, for delays and
 * orders.
 */
#ifndef PYHVD_RACES_H
#define PYHVD_RACES_H

#include "common/futex.h" /* first: it says which of the system's names there are */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "window/window.h"

#define MOST_RANKS 16

typedef struct {
    uint64_t state;
} dice;

typedef struct {
    int size, rounds;
    uint64_t seed;
} terms;

/* A number below n. */
uint64_t roll(dice *d, uint64_t n);
dice dice_of(uint64_t seed, uint64_t who);

/* Mix up a key: what is written is told apart by rank, round and place. */
uint64_t mixed(uint64_t key);

/* Mostly nothing; at times a turn of the core, or a short sleep. */
void linger(dice *d);

/* Zeroed memory of just so many bytes, aligned to a line. */
void *make(size_t bytes);

/* Say what went wrong, and end the process. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Run one thread per rank, and wait for them. */
void play(int size, void (*rank)(int rank, void *what), void *what);

void start_thread(pthread_t *thread, void *(*run)(void *), void *what);

/* Window areas for so many ranks, and this rank's view of them. */
void make_areas(uint8_t **areas, int size, size_t capacity);
void look_at(pyhvd_window *w, uint8_t *const *areas, int rank, int size, size_t capacity, size_t chunk);

/* The note that a rank leaves when it aborts, and whether one that was read is it. */
size_t write_note(uint8_t *note, int rank, uint64_t which);
int is_note(const uint8_t *note, size_t bytes, int rank, uint64_t which);

void play_windows(const terms *t);
void play_aborts(const terms *t);
void play_board(const terms *t);
void play_calls(const terms *t);
void play_lanes(const terms *t);
void play_lane_aborts(const terms *t);

#endif
