/* Loads cache lines before they are needed.
 *
 * GCC treats a function that only calls __builtin_prefetch as one without effect, and drops its
 * calls. The empty asm gives the function an effect.
 */
#ifndef PYHVD_PREFETCH_H
#define PYHVD_PREFETCH_H

#include <stddef.h>
#include <stdint.h>

#define PYHVD_PREFETCH_BYTES 64 /* bytes of one prefetch; PYHVD_LINE is twice as much */

/* Prefetch the first lines of an object for reading. */
static inline void pyhvd_prefetch(const void *object) {
    __builtin_prefetch(object, 0, 3);
    __builtin_prefetch((const char *)object + PYHVD_PREFETCH_BYTES, 0, 3);
    __asm__ volatile("");
}

/* Prefetch lines for writing. */
static inline void pyhvd_prefetch_for_writing(const uint8_t *at, size_t bytes) {
    for (size_t k = 0; k < bytes; k += PYHVD_PREFETCH_BYTES) __builtin_prefetch(at + k, 1, 3);
    __asm__ volatile("");
}

#endif
