/* A shared file in this process's memory, on huge pages if the kernel grants them.
 *
 * The kernel maps a huge page of a file as such only if its address and its offset in the file are
 * aligned alike; so a mapping begins at a multiple of PYHVD_HUGE. MADV_COLLAPSE (Linux 6.1) turns
 * existing memory into huge pages under any system setting. Without it, /dev/shm usually has none.
 */
#ifndef PYHVD_HUGE_PAGES_H
#define PYHVD_HUGE_PAGES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define PYHVD_HUGE ((size_t)2 << 20)

/* Advice: turn existing memory into huge pages; free the memory of whole pages in all processes that
 * map the file. */
#ifdef __linux__
enum { PYHVD_COLLAPSE = 25, PYHVD_REMOVE = MADV_REMOVE };
#else
enum { PYHVD_COLLAPSE = -1, PYHVD_REMOVE = -1 };
#endif

/* Map the first `nbytes` of a file; return NULL with errno set on failure. */
static inline void *pyhvd_map(int fd, size_t nbytes) {
    /* Reserve enough to contain an aligned range, then give back the ends. */
    uint8_t *reserved = mmap(NULL, nbytes + PYHVD_HUGE, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return NULL;
    size_t before = (PYHVD_HUGE - (uintptr_t)reserved % PYHVD_HUGE) % PYHVD_HUGE;
    void *start = mmap(reserved + before, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                       fd, 0);
    if (start == MAP_FAILED) {
        munmap(reserved, nbytes + PYHVD_HUGE);
        return NULL;
    }
    if (before) munmap(reserved, before);
    munmap(reserved + before + nbytes, PYHVD_HUGE - before);
    return start;
}

#endif
