/* Reading the memory of another process on the host: one copy, where shared memory needs two. Linux lets a
 * process of the same user do so, unless ptrace is restricted; macOS has no such call. */
#ifndef PYHVD_PEER_MEMORY_H
#define PYHVD_PEER_MEMORY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/uio.h>
#endif

#define PYHVD_READ_MOST ((size_t)1 << 30) /* bytes that one call reads, at most */

/* Read bytes at an address of a process; return 0 if that is not possible. */
static inline int pyhvd_read_process(int32_t pid, void *to, uint64_t from, size_t bytes) {
#ifdef __linux__
    uint8_t *at = to;
    while (bytes) {
        size_t most = bytes < PYHVD_READ_MOST ? bytes : PYHVD_READ_MOST;
        struct iovec here = {at, most}, there = {(void *)(uintptr_t)from, most};
        ssize_t got = process_vm_readv((pid_t)pid, &here, 1, &there, 1, 0);
        if (got <= 0) return 0;
        at += got, from += (uint64_t)got, bytes -= (size_t)got;
    }
    return 1;
#else
    (void)pid, (void)to, (void)from;
    return !bytes;
#endif
}

/* The same, where the process may be this one, whose threads are ranks. */
static inline int pyhvd_read_peer(int32_t pid, void *to, uint64_t from, size_t bytes) {
    if (pid != (int32_t)getpid()) return pyhvd_read_process(pid, to, from, bytes);
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 1;
}

#endif
