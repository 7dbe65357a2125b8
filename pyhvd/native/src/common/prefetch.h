/* Bringing lines into the cache before they are needed.
 *
 * GCC takes a function that does nothing but __builtin_prefetch for one without effect, and drops the calls of it. The
 * empty asm is the effect that it sees.
 */
#ifndef PYHVD_FETCH_H
#define PYHVD_FETCH_H

#include <stddef.h>
#include <stdint.h>

#define PYHVD_FETCHED 64 /* bytes that come at a time; control lines are further apart, see PYHVD_LINE */

/* The first lines of an object, to be read. */
static inline void pyhvd_fetch(const void *object) {
    __builtin_prefetch(object, 0, 3);
    __builtin_prefetch((const char *)object + PYHVD_FETCHED, 0, 3);
    __asm__ volatile("");
}

/* Lines that are about to be written. */
static inline void pyhvd_fetch_for_writing(const uint8_t *at, size_t bytes) {
    for (size_t k = 0; k < bytes; k += PYHVD_FETCHED) __builtin_prefetch(at + k, 1, 3);
    __asm__ volatile("");
}

#endif
