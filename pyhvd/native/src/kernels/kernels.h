/* The numeric kernels: plain C over plain addresses, no Python, no MPI, no state.
 *
 * Contract
 *   1. Element types and ops are the codes of pyhvd/dtypes.py. Addresses need no alignment.
 *   2. A function that returns int returns 0, or -1 for an undefined combination; it has then
 *      touched no memory.
 *   3. The bits of a result depend on the values and the order of the sources only, never on the
 *      machine, the instruction set or the block size. So sums run in source order, and the build
 *      uses -ffp-contract=off: a fused multiply-add rounds once, plain x86-64 code rounds twice.
 *   4. The exception is a NaN: its sign and payload depend on the processor.
 */
#ifndef PYHVD_KERNELS_H
#define PYHVD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* pyhvd.dtypes.Code */
// clang-format off
enum {
    PYHVD_UINT8, PYHVD_INT8, PYHVD_UINT16, PYHVD_INT16, PYHVD_INT32, PYHVD_INT64, PYHVD_FLOAT16,
    PYHVD_FLOAT32, PYHVD_FLOAT64, PYHVD_BOOL, PYHVD_BFLOAT16, PYHVD_UINT32, PYHVD_UINT64,
    PYHVD_COMPLEX64, PYHVD_COMPLEX128, PYHVD_DTYPES
};

/* pyhvd.dtypes.ReduceOp */
enum {
    PYHVD_AVERAGE, PYHVD_SUM, PYHVD_ADASUM, PYHVD_MIN, PYHVD_MAX, PYHVD_PRODUCT, PYHVD_BAND, PYHVD_BOR,
    PYHVD_BXOR, PYHVD_OPS
};
// clang-format on

/* How float16 is converted; the value of pyhvd_f16_path(). */
enum { PYHVD_F16_PORTABLE, PYHVD_F16_F16C, PYHVD_F16_AVX512, PYHVD_F16_PATHS };

/* Bytes per element; 0 for an unknown code. */
static inline size_t pyhvd_itemsize(int dtype) {
    static const uint8_t SIZES[PYHVD_DTYPES] = {
        [PYHVD_UINT8] = 1,   [PYHVD_INT8] = 1,      [PYHVD_BOOL] = 1,        [PYHVD_UINT16] = 2,
        [PYHVD_INT16] = 2,   [PYHVD_FLOAT16] = 2,   [PYHVD_BFLOAT16] = 2,    [PYHVD_INT32] = 4,
        [PYHVD_UINT32] = 4,  [PYHVD_FLOAT32] = 4,   [PYHVD_INT64] = 8,       [PYHVD_UINT64] = 8,
        [PYHVD_FLOAT64] = 8, [PYHVD_COMPLEX64] = 8, [PYHVD_COMPLEX128] = 16,
    };
    return dtype >= 0 && dtype < PYHVD_DTYPES ? SIZES[dtype] : 0;
}

/* Whether reduce and fill are defined for this pair, scale for this dtype and factor. */
int pyhvd_can_reduce(int dtype, int op);
int pyhvd_can_scale(int dtype, double factor);

/* dst[i] = factor * (srcs[0][i] op srcs[1][i] op ...); dst may equal one of the srcs exactly. */
int pyhvd_reduce(void *dst, const int64_t *srcs, size_t p, size_t count, int dtype, int op,
                 double factor);

/* dst[i] = factor * src[i]; dst may equal src exactly. */
int pyhvd_scale(void *dst, const void *src, size_t count, int dtype, double factor);

/* Conversion among the four float types; the arrays may not overlap unless the sizes are equal. */
int pyhvd_cast(void *dst, int dst_dtype, const void *src, int src_dtype, size_t count);

/* Fill dst with the neutral element x of the op: "y op x" is y. */
int pyhvd_fill(void *dst, size_t count, int dtype, int op);

/* Copy n pieces into dst, one behind the other, scaled; or from src into the pieces. A piece with
 * address 0 is filled with the neutral element, or skipped. */
int pyhvd_pack(void *dst, const int64_t *ptrs, const int64_t *counts, size_t n, int dtype, int op,
               double factor);
int pyhvd_unpack(const void *src, const int64_t *ptrs, const int64_t *counts, size_t n, int dtype);

/* Adasum of float32 and float64, for n pieces, one behind the other in a and in b.
 *   terms    per piece, in float64: a . b, a . a, b . b; the order of the sums depends on the count
 *   combine  dst[i] = factors[0] * a[i] + factors[1] * b[i], with two factors per piece, in
 *            float64, rounded once; dst may equal a or b exactly
 */
int pyhvd_adasum_terms(double *terms, const void *a, const void *b, const int64_t *counts, size_t n,
                       int dtype);
int pyhvd_adasum_combine(void *dst, const void *a, const void *b, const int64_t *counts,
                         const double *factors, size_t n, int dtype);

/* The float16 path in use; whether this machine has a path; conversions by a given path. */
int pyhvd_f16_path(void);
int pyhvd_f16_has(int path);
void pyhvd_f16_widen(int path, float *dst, const void *src, size_t count);
void pyhvd_f16_narrow(int path, void *dst, const float *src, size_t count);

#endif
