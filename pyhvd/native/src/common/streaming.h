/* Copies to memory that is not read again soon: the lines go past the caches.
 *
 * An ordinary store first loads the line that it writes, which for a large result is a third of all traffic.
 * Such copies are ordered by no release: pyhvd_stream_fence() comes before any.
 */
#ifndef PYHVD_STREAMING_H
#define PYHVD_STREAMING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bytes of an operation from which on its results go past the caches. With cold caches smaller ones would gain,
 * too; with warm ones 256 KiB would take a third longer. */
#define PYHVD_STREAMED ((int64_t)1 << 20)

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define PYHVD_STREAM_LINE 64

/* Copy whole lines to an address that begins one. */
static inline void pyhvd_stream_16(uint8_t *to, const uint8_t *from, size_t bytes) {
    for (size_t k = 0; k < bytes; k += 16)
        _mm_stream_si128((__m128i *)(to + k), _mm_loadu_si128((const __m128i *)(from + k)));
}

/* A line in one store: a processor that has it needs not gather four. */
__attribute__((target("avx512f"))) static void pyhvd_stream_64(uint8_t *to, const uint8_t *from,
                                                               size_t bytes) {
    for (size_t k = 0; k < bytes; k += 64)
        _mm512_stream_si512((__m512i *)(to + k), _mm512_loadu_si512(from + k));
}

static inline void pyhvd_stream_copy(uint8_t *to, const uint8_t *from, size_t bytes) {
    size_t head = (0 - (uintptr_t)to) % PYHVD_STREAM_LINE;
    if (head > bytes) head = bytes;
    size_t lines = (bytes - head) / PYHVD_STREAM_LINE * PYHVD_STREAM_LINE;
    memcpy(to, from, head);
    if (__builtin_cpu_supports("avx512f"))
        pyhvd_stream_64(to + head, from + head, lines);
    else
        pyhvd_stream_16(to + head, from + head, lines);
    memcpy(to + head + lines, from + head + lines, bytes - head - lines);
}

static inline void pyhvd_stream_fence(void) { _mm_sfence(); }
#else
static inline void pyhvd_stream_copy(uint8_t *to, const uint8_t *from, size_t bytes) {
    memcpy(to, from, bytes);
}

static inline void pyhvd_stream_fence(void) {}
#endif

/* Copy, past the caches if `streamed`. */
static inline void pyhvd_copy(uint8_t *to, const uint8_t *from, size_t bytes, int streamed) {
    if (streamed)
        pyhvd_stream_copy(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

#endif
