/* A shared file in this process's memory, on huge pages where they are to be had.
 *
 * The kernel maps a huge page of a file as one only where address and offset in the file are aligned alike,
 * so a mapping begins at a multiple of PYHVD_HUGE. MADV_COLLAPSE (Linux 6.1) makes huge pages of what is there,
 * whatever the system's settings for shared memory are: without it there are as a rule none in /dev/shm.
 */
#ifndef PYHVD_MAPPING_H
#define PYHVD_MAPPING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define PYHVD_HUGE ((size_t)2 << 20)

#if defined(__linux__) && !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25
#endif

/* Map so many bytes of a file, or return NULL with errno set. */
static inline void *pyhvd_map(int fd, size_t nbytes) {
    /* Address space with a multiple of PYHVD_HUGE in it: what lies before and behind is given back. */
    uint8_t *reserved = mmap(NULL, nbytes + PYHVD_HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return NULL;
    size_t before = (PYHVD_HUGE - (uintptr_t)reserved % PYHVD_HUGE) % PYHVD_HUGE;
    void *start = mmap(reserved + before, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (start == MAP_FAILED) {
        munmap(reserved, nbytes + PYHVD_HUGE);
        return NULL;
    }
    if (before) munmap(reserved, before);
    munmap(reserved + before + nbytes, PYHVD_HUGE - before);
    return start;
}

/* Put huge pages behind memory that is there already; 0 if the kernel does not. */
static inline int pyhvd_enlarge(void *start, size_t nbytes) {
#ifdef MADV_COLLAPSE
    return madvise(start, nbytes, MADV_COLLAPSE) == 0;
#else
    (void)start, (void)nbytes;
    return 0;
#endif
}

/* Give the memory behind whole pages of the file back, for everybody who has it mapped; 0 if that cannot be. */
static inline int pyhvd_drop(void *start, size_t nbytes) {
#ifdef MADV_REMOVE
    return madvise(start, nbytes, MADV_REMOVE) == 0;
#else
    (void)start, (void)nbytes;
    return 0;
#endif
}

#endif
