/* What progress.c (the engine) and submission.c (what is submitted to it) know of each other. */
#ifndef PYHVD_ENGINE_PARTS_H
#define PYHVD_ENGINE_PARTS_H

#include "common/futex.h"
#include "fast_path/progress.h"

static inline pyhvd_seat *seat_of(pyhvd_lane *lane) { return &lane->board.seats[lane->board.rank]; }

/* Those who wait without driving look again. */
void pyhvd_tell_waiters(pyhvd_lane *lane);

/* Whoever drives on this rank looks at the log again. */
void pyhvd_wake_driver(pyhvd_lane *lane);

/* So many tensors of a unit have ended. */
void pyhvd_end_parts(pyhvd_lane *lane, pyhvd_unit *unit, uint32_t n);

#endif
