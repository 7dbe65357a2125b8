/* Reduce, scale, fill, pack and unpack for every element type; kernels.h states the contract. */
#include "kernels/loops.h"

/* ---- Binary kernels: out[i] = a[i] op b[i] ----
 *
 *   1. Integers wrap. Sums and products are computed unsigned: C defines that, and the bits are the
 *      same.
 *   2. The minimum or maximum of a NaN and a number is a NaN. Of two zeros, min takes -0.0 and max
 *      takes +0.0. So the order of the sources does not matter.
 *   3. One trick gives both, at the cost of a NaN test. If neither x < y nor y < x, then the two
 *      are equal, or are zeros, or one is a NaN. The bitwise OR is then a NaN if there is one, or
 *      the negative zero. For the maximum, the sign is the bitwise AND.
 */
typedef void binary_fn(void *out, const void *a, const void *b, size_t n);

#define BINARY(name, T, expr)                                                    \
    CLONED static void name(void *out, const void *a, const void *b, size_t n) { \
        T *o = out;                                                              \
        const T *pa = a, *pb = b;                                                \
        EACH(i, n) {                                                             \
            const T x = pa[i], y = pb[i];                                        \
            o[i] = (expr);                                                       \
        }                                                                        \
    }

BINARY(sum_8, u8, (uint8_t)(x + y))
BINARY(sum_16, u16, (uint16_t)(x + y))
BINARY(sum_32, u32, x + y)
BINARY(sum_64, u64, x + y)
BINARY(sum_f32, f32, x + y)
BINARY(sum_f64, f64, x + y)

/* 16 bits: C promotes uint16 to int, which 65535 * 65535 overflows. */
BINARY(product_8, u8, (uint8_t)(x * y))
BINARY(product_16, u16, (uint16_t)((uint32_t)x * y))
BINARY(product_32, u32, x *y)
BINARY(product_64, u64, x *y)
BINARY(product_f32, f32, x *y)
BINARY(product_f64, f64, x *y)

#define BITWISE(N)                              \
    BINARY(and_##N, u##N, (uint##N##_t)(x & y)) \
    BINARY(or_##N, u##N, (uint##N##_t)(x | y))  \
    BINARY(xor_##N, u##N, (uint##N##_t)(x ^ y))

BITWISE(8)
BITWISE(16)
BITWISE(32)
BITWISE(64)

#define LEAST(F) (x < y ? x : y < x ? y : from_##F(bits_##F(x) | bits_##F(y)))
#define GREATEST(F, S) \
    (x > y   ? x       \
     : y > x ? y       \
             : from_##F(((bits_##F(x) | bits_##F(y)) & ~(S)) | (bits_##F(x) & bits_##F(y))))
BINARY(min_f32, f32, LEAST(f32))
BINARY(max_f32, f32, GREATEST(f32, 0x80000000u))
BINARY(min_f64, f64, LEAST(f64))
BINARY(max_f64, f64, GREATEST(f64, 0x8000000000000000u))

// cppcheck-suppress bitwiseOnBoolean - && would branch, and not vectorise
BINARY(and_bool, u8, (uint8_t)((x != 0) & (y != 0)))
BINARY(or_bool, u8, (uint8_t)((x | y) != 0))
BINARY(xor_bool, u8, (uint8_t)((x != 0) ^ (y != 0)))

/* out[i] = (a[i] + b[i]) * factor: the last step of an average, in one pass. */
typedef void sum_scaled_fn(void *out, const void *a, const void *b, size_t n, double factor);

#define SUM_SCALED(T, R)                                                                 \
    CLONED static void sum_scaled_##T(void *out, const void *a, const void *b, size_t n, \
                                      double factor) {                                   \
        T *o = out;                                                                      \
        const T *pa = a, *pb = b;                                                        \
        const R f = (R)factor;                                                           \
        EACH(i, n) o[i] = (pa[i] + pb[i]) * f;                                           \
    }

SUM_SCALED(f32, float)
SUM_SCALED(f64, double)

/* ---- Scaling: out[i] = in[i] * factor ----
 *
 *   1. As in Horovod, float32 and complex64 use the factor as float32, all others as float64.
 *   2. Integers are multiplied as float64 and truncated toward zero. Values out of range saturate,
 *      and NaN gives 0 (a plain C cast of such values is undefined).
 */
typedef void scale_fn(void *out, const void *in, size_t n, double factor);

#define SCALE(name, T, R, expr)                                                           \
    CLONED static void scale_##name(void *out, const void *in, size_t n, double factor) { \
        T *o = out;                                                                       \
        const T *p = in;                                                                  \
        const R f = (R)factor;                                                            \
        EACH(i, n) {                                                                      \
            const R r = (R)p[i] * f;                                                      \
            o[i] = (expr);                                                                \
        }                                                                                 \
    }

SCALE(f32, f32, float, r)
SCALE(f64, f64, double, r)

/* ---- Integers and complex numbers ---- */

/* What the sign of an integer type changes. TOP is MAX + 1, which float64 represents exactly even if
 * it cannot represent MAX. */
#define INTEGERS(T, MIN, MAX, TOP)    \
    BINARY(min_##T, T, x < y ? x : y) \
    BINARY(max_##T, T, x > y ? x : y) \
    SCALE(T, T, double, r != r ? 0 : r >= (TOP) ? (MAX) : r <= (double)(MIN) ? (MIN) : (T)r)

INTEGERS(u8, 0, UINT8_MAX, 256.0)
INTEGERS(i8, INT8_MIN, INT8_MAX, 128.0)
INTEGERS(u16, 0, UINT16_MAX, 65536.0)
INTEGERS(i16, INT16_MIN, INT16_MAX, 32768.0)
INTEGERS(u32, 0, UINT32_MAX, 4294967296.0)
INTEGERS(i32, INT32_MIN, INT32_MAX, 2147483648.0)
INTEGERS(u64, 0, UINT64_MAX, 18446744073709551616.0)
INTEGERS(i64, INT64_MIN, INT64_MAX, 9223372036854775808.0)

/* Complex numbers use the plain formula, as numpy does, without C99's correction of infinities. The
 * product is not CLONED: even with -ffp-contract=off, gcc 12 turns it into vfmaddsub. */
#define COMPLEX(name, T, R)                                                                 \
    static void sum_##name(void *out, const void *a, const void *b, size_t n) {             \
        sum_##T(out, a, b, 2 * n);                                                          \
    }                                                                                       \
    static void sum_scaled_##name(void *out, const void *a, const void *b, size_t n,        \
                                  double factor) {                                          \
        sum_scaled_##T(out, a, b, 2 * n, factor);                                           \
    }                                                                                       \
    static void scale_##name(void *out, const void *in, size_t n, double factor) {          \
        scale_##T(out, in, 2 * n, factor);                                                  \
    }                                                                                       \
    static void product_##name(void *out, const void *a, const void *b, size_t n) {         \
        T *o = out;                                                                         \
        const T *pa = a, *pb = b;                                                           \
        EACH(i, n) {                                                                        \
            const R ar = pa[2 * i], ai = pa[2 * i + 1], br = pb[2 * i], bi = pb[2 * i + 1]; \
            o[2 * i] = ar * br - ai * bi;                                                   \
            o[2 * i + 1] = ar * bi + ai * br;                                               \
        }                                                                                   \
    }

COMPLEX(c64, f32, float)
COMPLEX(c128, f64, double)

/* ---- The table of element types ---- */

/* The arrays are indexed by op; Average is a sum, which the factor divides. */
struct row {
    binary_fn *op[PYHVD_OPS];    /* of float32 for the two 16-bit floats; NULL: not defined */
    scale_fn *scale;             /* likewise */
    sum_scaled_fn *sum_scaled;   /* likewise; NULL: sum, then scale */
    uint64_t neutral[PYHVD_OPS]; /* bits of a real number, or of the real part */
};

// clang-format off
#define OPS(SUM, LEAST, GREATEST, PRODUCT, AND, OR, XOR) {SUM, SUM, 0, LEAST, GREATEST, PRODUCT, AND, OR, XOR}
#define NUMERIC(SUM, LEAST, GREATEST, PRODUCT) OPS(SUM, LEAST, GREATEST, PRODUCT, 0, 0, 0)
#define INTEGER(N, T, LO, HI) \
    {OPS(sum_##N, min_##T, max_##T, product_##N, and_##N, or_##N, xor_##N), scale_##T, NULL, \
     OPS(0, (uint64_t)(HI), (uint64_t)(LO), 1, UINT64_MAX, 0, 0)}
#define FLOAT(F, ZERO, INF, NEGATIVE, ONE) \
    {NUMERIC(sum_##F, min_##F, max_##F, product_##F), scale_##F, sum_scaled_##F, NUMERIC(ZERO, INF, NEGATIVE, ONE)}
#define COMPLEX_ROW(C, ZERO, ONE) \
    {NUMERIC(sum_##C, NULL, NULL, product_##C), scale_##C, sum_scaled_##C, NUMERIC(ZERO, 0, 0, ONE)}
// clang-format on

/* The neutral element of a float sum is -0.0: x + -0.0 is x for every x; -0.0 + 0.0 is 0.0. */
static const struct row ROWS[PYHVD_DTYPES] = {
    [PYHVD_UINT8] = INTEGER(8, u8, 0, UINT8_MAX),
    [PYHVD_INT8] = INTEGER(8, i8, INT8_MIN, INT8_MAX),
    [PYHVD_UINT16] = INTEGER(16, u16, 0, UINT16_MAX),
    [PYHVD_INT16] = INTEGER(16, i16, INT16_MIN, INT16_MAX),
    [PYHVD_INT32] = INTEGER(32, i32, INT32_MIN, INT32_MAX),
    [PYHVD_INT64] = INTEGER(64, i64, INT64_MIN, INT64_MAX),
    [PYHVD_UINT32] = INTEGER(32, u32, 0, UINT32_MAX),
    [PYHVD_UINT64] = INTEGER(64, u64, 0, UINT64_MAX),
    [PYHVD_FLOAT16] = FLOAT(f32, 0x8000, 0x7c00, 0xfc00, 0x3c00),
    [PYHVD_BFLOAT16] = FLOAT(f32, 0x8000, 0x7f80, 0xff80, 0x3f80),
    [PYHVD_FLOAT32] = FLOAT(f32, 0x80000000u, 0x7f800000u, 0xff800000u, 0x3f800000u),
    [PYHVD_FLOAT64] = FLOAT(f64, 0x8000000000000000u, 0x7ff0000000000000u, 0xfff0000000000000u,
                            0x3ff0000000000000u),
    [PYHVD_BOOL] = {OPS(NULL, and_bool, or_bool, and_bool, and_bool, or_bool, xor_bool), NULL, NULL,
                    OPS(0, 1, 0, 1, 1, 0, 0)},
    [PYHVD_COMPLEX64] = COMPLEX_ROW(c64, 0x80000000u, 0x3f800000u),
    [PYHVD_COMPLEX128] = COMPLEX_ROW(c128, 0x8000000000000000u, 0x3ff0000000000000u),
};

static int known(int dtype) { return dtype >= 0 && dtype < PYHVD_DTYPES; }
static int is_complex(int dtype) { return dtype == PYHVD_COMPLEX64 || dtype == PYHVD_COMPLEX128; }

int pyhvd_can_reduce(int dtype, int op) {
    return known(dtype) && op >= 0 && op < PYHVD_OPS && ROWS[dtype].op[op] != NULL;
}

int pyhvd_can_scale(int dtype, double factor) {
    return known(dtype) && (factor == 1.0 || ROWS[dtype].scale != NULL);
}

/* ---- The entry points ---- */

/* out = (left op right) * factor; for the 16-bit floats, all three are float32. */
static void combine_and_scale(const struct row *row, int op, void *out, const void *left,
                              const void *right, size_t n, double factor) {
    if (factor != 1.0 && op <= PYHVD_SUM && row->sum_scaled != NULL) {
        row->sum_scaled(out, left, right, n, factor);
        return;
    }
    row->op[op](out, left, right, n);
    if (factor != 1.0) row->scale(out, out, n, factor);
}

/* Reduce 16-bit floats: compute in float32, and round once at the end. */
static void reduce_half(char *dst, const int64_t *srcs, size_t p, size_t count, int dtype, int op,
                        double factor) {
    widen_fn *const widen = pyhvd_widener(dtype);
    narrow_fn *const narrow = pyhvd_narrower(dtype);
    /* 16 more: arrays a power of two apart collide in the cache, at a quarter of the speed. */
    _Alignas(64) float acc[BLOCK + 16], term[BLOCK];
    for (size_t start = 0; start < count; start += BLOCK) {
        const size_t n = lesser(BLOCK, count - start), at = start * 2;
        widen(acc, (const char *)(intptr_t)srcs[0] + at, n);
        for (size_t k = 1; k < p; k++) {
            widen(term, (const char *)(intptr_t)srcs[k] + at, n);
            combine_and_scale(&ROWS[dtype], op, acc, acc, term, n, k + 1 < p ? 1.0 : factor);
        }
        if (p == 1) scale_f32(acc, acc, n, factor);
        narrow(dst + at, acc, n);
    }
}

/* Reduce all other types, p >= 2. Only the last step of a block writes to dst, after all sources of
 * the block were read. So dst may be any one of the sources. */
static void reduce_wide(char *dst, const int64_t *srcs, size_t p, size_t count, int dtype, int op,
                        double factor) {
    const struct row *const row = &ROWS[dtype];
    const size_t item = pyhvd_itemsize(dtype);
    _Alignas(64) char acc[BLOCK * sizeof(double)];
    /* Two sources need no accumulator. Scaling needs the block while it is in the cache. */
    const size_t block = p == 2 && factor == 1.0 ? count : sizeof acc / item;
    for (size_t start = 0; start < count; start += block) {
        const size_t n = lesser(block, count - start), at = start * item;
        const void *left = (const char *)(intptr_t)srcs[0] + at;
        for (size_t k = 1; k + 1 < p; k++) {
            row->op[op](acc, left, (const char *)(intptr_t)srcs[k] + at, n);
            left = acc;
        }
        combine_and_scale(row, op, dst + at, left, (const char *)(intptr_t)srcs[p - 1] + at, n,
                          factor);
    }
}

int pyhvd_reduce(void *dst, const int64_t *srcs, size_t p, size_t count, int dtype, int op,
                 double factor) {
    if (p == 0 || !pyhvd_can_reduce(dtype, op) || !pyhvd_can_scale(dtype, factor)) return -1;
    const void *const first = (const void *)(intptr_t)srcs[0];
    if (p == 1 && dtype == PYHVD_BOOL)
        and_bool(dst, first, first, count); /* turns any nonzero byte into 1 */
    else if (p == 1)
        return pyhvd_scale(dst, first, count, dtype, factor);
    else if (is_half(dtype))
        reduce_half(dst, srcs, p, count, dtype, op, factor);
    else
        reduce_wide(dst, srcs, p, count, dtype, op, factor);
    return 0;
}

int pyhvd_scale(void *dst, const void *src, size_t count, int dtype, double factor) {
    if (!pyhvd_can_scale(dtype, factor)) return -1;
    const int64_t source = (int64_t)(intptr_t)src;
    if (factor != 1.0 && is_half(dtype))
        reduce_half(dst, &source, 1, count, dtype, PYHVD_SUM, factor);
    else if (factor != 1.0)
        ROWS[dtype].scale(dst, src, count, factor);
    else if (dst != src && count != 0)
        memcpy(dst, src, count * pyhvd_itemsize(dtype));
    return 0;
}

int pyhvd_fill(void *dst, size_t count, int dtype, int op) {
    if (!pyhvd_can_reduce(dtype, op)) return -1;
    const uint64_t real = ROWS[dtype].neutral[op];
    const int pairs = is_complex(dtype);
    /* A complex sum starts at -0.0 - 0.0i, a product at 1 + 0i. */
    const uint64_t odd = pairs && op == PYHVD_PRODUCT ? 0 : real;
    const size_t words = pairs ? 2 * count : count;
    switch (pyhvd_itemsize(dtype) / (pairs ? 2 : 1)) {
    case 1: memset(dst, (int)real, words); break;
    case 2:
        EACH(i, words) ((u16 *)dst)[i] = (uint16_t)real;
        break;
    case 4:
        EACH(i, words) ((u32 *)dst)[i] = (uint32_t)(i & 1 ? odd : real);
        break;
    default: EACH(i, words) ((u64 *)dst)[i] = i & 1 ? odd : real;
    }
    return 0;
}

int pyhvd_pack(void *dst, const int64_t *ptrs, const int64_t *counts, size_t n, int dtype, int op,
               double factor) {
    if (!pyhvd_can_scale(dtype, factor)) return -1;
    char *out = dst;
    for (size_t i = 0; i < n; i++) /* op matters only for pieces that are filled */
        if (ptrs[i] == 0 && counts[i] > 0 && !pyhvd_can_reduce(dtype, op)) return -1;
    for (size_t i = 0; i < n; i++) {
        const size_t count = (size_t)counts[i];
        if (ptrs[i] == 0)
            pyhvd_fill(out, count, dtype, op);
        else
            pyhvd_scale(out, (const void *)(intptr_t)ptrs[i], count, dtype, factor);
        out += count * pyhvd_itemsize(dtype);
    }
    return 0;
}

int pyhvd_unpack(const void *src, const int64_t *ptrs, const int64_t *counts, size_t n, int dtype) {
    if (!known(dtype)) return -1;
    const char *in = src;
    for (size_t i = 0; i < n; i++) {
        const size_t bytes = (size_t)counts[i] * pyhvd_itemsize(dtype);
        if (ptrs[i] != 0 && bytes != 0) memcpy((void *)(intptr_t)ptrs[i], in, bytes);
        in += bytes;
    }
    return 0;
}
