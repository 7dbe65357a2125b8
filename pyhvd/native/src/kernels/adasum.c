/* Adasum's two kernels; kernels.h states the contract. */
#include "kernels/loops.h"

/* Sums run in eight lanes, element i in lane i % 8; the lanes are added at the end. So the order is
 * the same with vectors of any width. The lanes are vector types, because gcc does not keep an
 * array of accumulators in registers. */
enum { LANES = 8 };
typedef double lanes_f64 __attribute__((vector_size(LANES * sizeof(double))));
typedef float lanes_f32 __attribute__((vector_size(LANES * sizeof(float))));

static double folded(const lanes_f64 *sums) {
    double s[LANES];
    memcpy(s, sums, sizeof s);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

typedef void terms_fn(double *out, const void *a, const void *b, size_t n);
typedef void combine_fn(void *out, const void *a, const void *b, size_t n, const double *factors);

#define ADD_TERMS(T, at_a, at_b)                                   \
    {                                                              \
        lanes_##T u, v;                                            \
        memcpy(&u, at_a, sizeof u);                                \
        memcpy(&v, at_b, sizeof v);                                \
        const lanes_f64 x = __builtin_convertvector(u, lanes_f64); \
        const lanes_f64 y = __builtin_convertvector(v, lanes_f64); \
        dot += x * y;                                              \
        left += x * x;                                             \
        right += y * y;                                            \
    }

/* The last row of lanes is padded with zeros. */
#define KERNELS(T)                                                                      \
    CLONED static void terms_##T(double *out, const void *a, const void *b, size_t n) { \
        const T *pa = a, *pb = b;                                                       \
        lanes_f64 dot = {0}, left = {0}, right = {0};                                   \
        size_t i = 0;                                                                   \
        for (; i + LANES <= n; i += LANES) ADD_TERMS(T, pa + i, pb + i)                 \
        if (i < n) {                                                                    \
            lanes_##T rest_a = {0}, rest_b = {0};                                       \
            memcpy(&rest_a, pa + i, (n - i) * sizeof(T));                               \
            memcpy(&rest_b, pb + i, (n - i) * sizeof(T));                               \
            ADD_TERMS(T, &rest_a, &rest_b)                                              \
        }                                                                               \
        out[0] = folded(&dot);                                                          \
        out[1] = folded(&left);                                                         \
        out[2] = folded(&right);                                                        \
    }                                                                                   \
    CLONED static void combine_##T(void *out, const void *a, const void *b, size_t n,   \
                                   const double *factors) {                             \
        T *o = out;                                                                     \
        const T *pa = a, *pb = b;                                                       \
        const double fa = factors[0], fb = factors[1];                                  \
        EACH(i, n) {                                                                    \
            const double x = pa[i], y = pb[i];                                          \
            o[i] = (T)(fa * x + fb * y);                                                \
        }                                                                               \
    }

KERNELS(f32)
KERNELS(f64)

static int has_adasum(int dtype) { return dtype == PYHVD_FLOAT32 || dtype == PYHVD_FLOAT64; }

int pyhvd_adasum_terms(double *terms, const void *a, const void *b, const int64_t *counts, size_t n,
                       int dtype) {
    if (!has_adasum(dtype)) return -1;
    terms_fn *const each = dtype == PYHVD_FLOAT32 ? terms_f32 : terms_f64;
    const char *x = a, *y = b;
    for (size_t k = 0; k < n; k++) {
        const size_t count = (size_t)counts[k], bytes = count * pyhvd_itemsize(dtype);
        each(terms + 3 * k, x, y, count);
        x += bytes;
        y += bytes;
    }
    return 0;
}

int pyhvd_adasum_combine(void *dst, const void *a, const void *b, const int64_t *counts,
                         const double *factors, size_t n, int dtype) {
    if (!has_adasum(dtype)) return -1;
    combine_fn *const each = dtype == PYHVD_FLOAT32 ? combine_f32 : combine_f64;
    char *out = dst;
    const char *x = a, *y = b;
    for (size_t k = 0; k < n; k++) {
        const size_t count = (size_t)counts[k], bytes = count * pyhvd_itemsize(dtype);
        each(out, x, y, count, factors + 2 * k);
        out += bytes;
        x += bytes;
        y += bytes;
    }
    return 0;
}
