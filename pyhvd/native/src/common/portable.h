/* What macOS lacks: ppoll, conditions on CLOCK_MONOTONIC and, in older SDKs, MSG_NOSIGNAL. */
#ifndef PYHVD_PORTABLE_H
#define PYHVD_PORTABLE_H

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

#include "common/futex.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE */
#endif

/* poll(2) for at most `ns`; on macOS rounded up to ms. */
static inline int pyhvd_poll(struct pollfd *polls, nfds_t n, int64_t ns) {
#ifdef __APPLE__
    int64_t ms = ns / 1000000 + (ns % 1000000 > 0);
    return poll(polls, n, ms > INT_MAX ? INT_MAX : (int)ms);
#else
    struct timespec limit = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return ppoll(polls, n, &limit, NULL);
#endif
}

/* Make a condition for pyhvd_cond_wait_until. */
static inline void pyhvd_cond_init(pthread_cond_t *cond) {
#ifdef __APPLE__
    pthread_cond_init(cond, NULL);
#else
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
#endif
}

/* Wait for a signal until the time `at` of pyhvd_now(). Return 0 after a signal, or without a cause;
 * ETIMEDOUT after that time. */
static inline int pyhvd_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t at) {
#ifdef __APPLE__
    int64_t left = at - pyhvd_now();
    if (left <= 0) return ETIMEDOUT;
    struct timespec nap = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
    return pthread_cond_timedwait_relative_np(cond, mutex, &nap);
#else
    struct timespec until = {(time_t)(at / 1000000000), (long)(at % 1000000000)};
    return pthread_cond_timedwait(cond, mutex, &until);
#endif
}

#endif
