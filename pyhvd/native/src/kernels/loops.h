/* Tools for the kernels' loops: run-time dispatch, vectorisation, unaligned types, bit casts. */
#ifndef PYHVD_LOOPS_H
#define PYHVD_LOOPS_H

#include "kernels/kernels.h"

#include <float.h>
#include <stdlib.h> /* also defines __GLIBC__ under glibc */
#include <string.h>

#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "pyhvd needs float arithmetic in float (on 32-bit x86: -msse2 -mfpmath=sse)"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

#if !defined(__has_attribute)
#define __has_attribute(x) 0
#endif

/* A CLONED function is compiled three times, and the dynamic linker picks one, by ifuncs of glibc.
 *   1. The levels v3 and v4 of gcc 12 have the byte and word instructions that 16-bit floats need.
 *      They have FMA too: see the contract in kernels.h.
 *   2. There are no clones under ThreadSanitizer: the linker would call it before it is set up.
 */
#if defined(__SANITIZE_THREAD__) || !HAVE_X86 || !defined(__GLIBC__) || \
    !__has_attribute(target_clones)
#define CLONED
#elif !defined(__clang__) && __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

/* Every loop reads element i, then writes element i, and touches nothing else. So an output may be
 * exactly one of the inputs, and the compiler needs no overlap test; that test would send the
 * in-place case to the scalar loop. */
#if defined(__clang__)
#define EACH(i, n) _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < (n); i++)
#elif defined(__GNUC__)
#define EACH(i, n) _Pragma("GCC ivdep") for (size_t i = 0; i < (n); i++)
#else
#define EACH(i, n) for (size_t i = 0; i < (n); i++)
#endif

/* Elements of a block: accumulator and converted source, 2 KiB each in float, fit the L1 cache. */
enum { BLOCK = 512 };

/* Callers pass views at any byte offset: without aligned(1) the compiler may use aligned moves. */
#define LOOSE __attribute__((aligned(1), may_alias))
typedef uint8_t u8 LOOSE;
typedef int8_t i8 LOOSE;
typedef uint16_t u16 LOOSE;
typedef int16_t i16 LOOSE;
typedef uint32_t u32 LOOSE;
typedef int32_t i32 LOOSE;
typedef uint64_t u64 LOOSE;
typedef int64_t i64 LOOSE;
typedef float f32 LOOSE;
typedef double f64 LOOSE;

#define BIT_CAST(name, TO, FROM)        \
    static inline TO name(FROM x) {     \
        TO bits;                        \
        memcpy(&bits, &x, sizeof bits); \
        return bits;                    \
    }

BIT_CAST(bits_f32, uint32_t, float)
BIT_CAST(bits_f64, uint64_t, double)
BIT_CAST(from_f32, float, uint32_t)
BIT_CAST(from_f64, double, uint64_t)

static inline size_t lesser(size_t a, size_t b) { return a < b ? a : b; }

/* ---- convert.c's face to kernels.c: from and to float32, n elements, the 16-bit side unaligned.
 * ---- */
typedef void widen_fn(float *out, const void *in, size_t n);
typedef void narrow_fn(void *out, const float *in, size_t n);
widen_fn *pyhvd_widener(int dtype);
narrow_fn *pyhvd_narrower(int dtype);

static inline int is_half(int dtype) { return dtype == PYHVD_FLOAT16 || dtype == PYHVD_BFLOAT16; }

#endif
