/* What the scenarios share. Ranks are threads of one process, so that the sanitizers see all shared
 * memory.
 *
 * Every rank draws random numbers from a *plan*, the same on all ranks, and from a *draw* of its
 * own, for delays and orders.
 */
#ifndef PYHVD_RACES_H
#define PYHVD_RACES_H

#include "common/futex.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "agreement/agreement.h"
#include "exchange/exchange.h"
#include "window/window.h"

#define MOST_RANKS 16
#define MOST_HOSTS 4

typedef struct {
    uint64_t state;
} dice;

typedef struct {
    int size, rounds;
    uint64_t seed;
} terms;

enum { BELLS = 3 }; /* of a rank: its exchange, its progress, its background thread */

/* Ranks of several hosts, numbered host by host, and their connections. */
typedef struct {
    int hosts, slices;
    int ranks[MOST_HOSTS], first[MOST_HOSTS + 1], host_of[MOST_RANKS];
    int32_t parents[MOST_HOSTS]; /* in the tree of hosts; -1: none */
    int bells[BELLS][MOST_RANKS];
    /* of each slice's rail, and then of the agreement: the host's end, to the other host */
    int fds[MOST_RANKS + 1][MOST_HOSTS][MOST_HOSTS];
} layout;

/* A number below n. */
uint64_t roll(dice *d, uint64_t n);
dice dice_of(uint64_t seed, uint64_t who);

/* Hash a key, for data that differs by rank, round and position. */
uint64_t mixed(uint64_t key);

/* Usually return at once; sometimes yield, spin, or sleep briefly. */
void linger(dice *d);

/* Allocate `bytes` zeroed bytes, aligned to a line. */
void *make(size_t bytes);

/* Print an error, and end the process. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Run one thread per rank, and wait for them. */
void play(int size, void (*rank)(int rank, void *what), void *what);

void start_thread(pthread_t *thread, void *(*run)(void *), void *what);

/* Allocate the areas of a window, for one host or several; set up one rank's view of them. */
void make_areas(uint8_t **areas, int size, size_t capacity);
void look_at(pyhvd_window *w, uint8_t *const *areas, int rank, int size, size_t capacity,
             size_t chunk);

/* Draw how many hosts there are, how many ranks each has, and the tree of hosts; open and close their connections. */
void draw_layout(layout *l, int size, dice *plan);
void connect_hosts(layout *l);
void part_hosts(const layout *l);

/* Set up one rank's view of its host's areas, and its exchange with the other hosts. */
void link_up(pyhvd_window *w, pyhvd_exchange *e, const layout *l, int rank, uint8_t *const *areas,
             size_t capacity);

/* Allocate the ready table of a host, with its agreement; attach it on a rank of the host. */
void *make_table(const layout *l, int host, uint32_t slots);
void attach_table(pyhvd_ready_table *t, pyhvd_agreement *a, void *base, const layout *l, int rank,
                  uint32_t slots);

/* Write the note with which a rank aborts; return whether a note is that one. */
size_t write_note(uint8_t *note, int rank, uint64_t which);
int is_note(const uint8_t *note, size_t bytes, int rank, uint64_t which);

void play_windows(const terms *t);
void play_aborts(const terms *t);
void play_hosts(const terms *t);
void play_table(const terms *t);
void play_calls(const terms *t);
void play_ids(const terms *t);
void play_paths(const terms *t);
void play_path_aborts(const terms *t);
void play_agreements(const terms *t);
void play_turns(const terms *t);

#endif
