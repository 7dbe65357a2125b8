/* Conversions among float16, bfloat16, float32 and float64; kernels.h states the contract. */
#include "kernels/loops.h"

#if HAVE_X86
#include <cpuid.h>
#include <immintrin.h>
#endif

/* ---- float16 and bfloat16 to float32 and back ----
 *
 * They round to nearest even and keep subnormals. A NaN stays a NaN, with the quiet bit set and the
 * upper bits of its payload kept, as the instructions vcvtph2ps and vcvtps2ph do. So all float16
 * paths give the same bits.
 */
static inline float widen_one(uint32_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    const uint32_t tiny = bits_f32((float)(int32_t)rest * 0x1p-24f);
    const uint32_t normal = (rest << 13) + (112u << 23);
    const uint32_t special = (rest << 13) | 0x7f800000u | ((uint32_t)(rest > 0x7c00u) << 22);
    const uint32_t finite = rest < 0x400u ? tiny : normal;
    return from_f32(sign | (rest < 0x7c00u ? finite : special));
}

static inline uint16_t narrow_one(float x) {
    const uint32_t u = bits_f32(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    const int32_t size = (int32_t)rest;
    /* The last bit of 0.5f is 2^-24, the smallest float16: the addition rounds. */
    const uint32_t tiny = bits_f32(from_f32(rest) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    const uint32_t special = size > 0x7f800000 ? 0x7e00u | ((rest >> 13) & 0x3ffu) : 0x7c00u;
    return (uint16_t)(sign | (size < 0x38800000 ? tiny : size < 0x477ff000 ? normal : special));
}

CLONED static void widen_portable(float *out, const void *in, size_t n) {
    const u16 *p = in;
    f32 *o = out;
    EACH(i, n) o[i] = widen_one(p[i]);
}

CLONED static void narrow_portable(void *out, const float *in, size_t n) {
    u16 *o = out;
    const f32 *p = in;
    EACH(i, n) o[i] = narrow_one(p[i]);
}

CLONED static void widen_bf16(float *out, const void *in, size_t n) {
    const u16 *p = in;
    f32 *o = out;
    EACH(i, n) o[i] = from_f32((uint32_t)p[i] << 16);
}

CLONED static void narrow_bf16(void *out, const float *in, size_t n) {
    u16 *o = out;
    const f32 *p = in;
    EACH(i, n) {
        const float x = p[i];
        const uint32_t u = bits_f32(x);
        /* To the nearest even, or for a NaN: set the quiet bit. An addend, and not a choice between
         * two results, keeps gcc in 32 bits until the one shift at the end: 1.5 times as fast. */
        const uint32_t addend = x != x ? ~u & 0x400000u : 0x7fffu + ((u >> 16) & 1u);
        o[i] = (uint16_t)((u + addend) >> 16);
    }
}

#if HAVE_X86
__attribute__((target("avx2,f16c"))) static void widen_f16c(float *out, const void *in, size_t n) {
    const u16 *p = in;
    f32 *o = out;
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps((float *)(void *)(o + i),
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + i))));
    for (; i < n; i++) o[i] = widen_one(p[i]);
}

__attribute__((target("avx2,f16c"))) static void narrow_f16c(void *out, const float *in, size_t n) {
    const f32 *p = in;
    u16 *o = out;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_loadu_ps((const float *)(const void *)(p + i));
        _mm_storeu_si128((__m128i *)(o + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < n; i++) o[i] = narrow_one(p[i]);
}

__attribute__((target("avx512f"))) static void widen_avx512(float *out, const void *in, size_t n) {
    const u16 *p = in;
    f32 *o = out;
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(o + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + i))));
    for (; i < n; i++) o[i] = widen_one(p[i]);
}

__attribute__((target("avx512f"))) static void narrow_avx512(void *out, const float *in, size_t n) {
    const f32 *p = in;
    u16 *o = out;
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(o + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(p + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) o[i] = narrow_one(p[i]);
}
#endif

static const struct {
    widen_fn *widen;
    narrow_fn *narrow;
} F16[PYHVD_F16_PATHS] = {
    [PYHVD_F16_PORTABLE] = {widen_portable, narrow_portable},
#if HAVE_X86
    [PYHVD_F16_F16C] = {widen_f16c, narrow_f16c},
    [PYHVD_F16_AVX512] = {widen_avx512, narrow_avx512},
#endif
};

/* Written once, by the constructor, when the library is loaded: no thread or subinterpreter can
 * race it. */
static int f16_path = PYHVD_F16_PORTABLE;

#if HAVE_X86
__attribute__((constructor)) static void choose_f16_path(void) {
    if (pyhvd_f16_has(PYHVD_F16_AVX512))
        f16_path = PYHVD_F16_AVX512;
    else if (pyhvd_f16_has(PYHVD_F16_F16C))
        f16_path = PYHVD_F16_F16C;
}
#endif

int pyhvd_f16_path(void) { return f16_path; }

int pyhvd_f16_has(int path) {
#if HAVE_X86
    unsigned eax, ebx, ecx, edx;
    __builtin_cpu_init();
    if (path == PYHVD_F16_AVX512) return __builtin_cpu_supports("avx512f") != 0;
    /* Older compilers do not know the name "f16c"; "avx2" covers that the system saves the
     * registers. */
    if (path == PYHVD_F16_F16C)
        return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
               (ecx & bit_F16C);
#endif
    return path == PYHVD_F16_PORTABLE;
}

void pyhvd_f16_widen(int path, float *dst, const void *src, size_t count) {
    F16[path].widen(dst, src, count);
}

void pyhvd_f16_narrow(int path, void *dst, const float *src, size_t count) {
    F16[path].narrow(dst, src, count);
}

widen_fn *pyhvd_widener(int dtype) {
    return dtype == PYHVD_FLOAT16 ? F16[f16_path].widen : widen_bf16;
}
narrow_fn *pyhvd_narrower(int dtype) {
    return dtype == PYHVD_FLOAT16 ? F16[f16_path].narrow : narrow_bf16;
}

/* ---- float64 to and from float32 ---- */

CLONED static void widen_f64(double *out, const float *in, size_t n) {
    f64 *o = out;
    const f32 *p = in;
    EACH(i, n) o[i] = p[i];
}

CLONED static void narrow_f64(float *out, const double *in, size_t n) {
    f32 *o = out;
    const f64 *p = in;
    EACH(i, n) o[i] = (float)p[i];
}

/* On the way to 16 bits: round to odd (cut off, and set the last bit if anything was lost), so that
 * the rounding that follows sees on which side of a tie the float64 lay. */
CLONED static void narrow_f64_to_odd(float *out, const double *in, size_t n) {
    f32 *o = out;
    const f64 *p = in;
    EACH(i, n) {
        const double x = p[i];
        const float near = (float)x;
        const double back = near, size = x < 0 ? -x : x, back_size = back < 0 ? -back : back;
        o[i] = from_f32((bits_f32(near) - (back_size > size ? 1u : 0u)) | (back != x ? 1u : 0u));
    }
}

static int is_float(int dtype) {
    return is_half(dtype) || dtype == PYHVD_FLOAT32 || dtype == PYHVD_FLOAT64;
}

int pyhvd_cast(void *dst, int dst_dtype, const void *src, int src_dtype, size_t count) {
    if (!is_float(dst_dtype) || !is_float(src_dtype)) return -1;
    if (dst_dtype == src_dtype) return pyhvd_scale(dst, src, count, dst_dtype, 1.0);
    /* By blocks of float32, unless that is one side itself. */
    float buffer[BLOCK];
    for (size_t start = 0; start < count; start += BLOCK) {
        const size_t n = lesser(BLOCK, count - start);
        const char *const in = (const char *)src + start * pyhvd_itemsize(src_dtype);
        char *const out = (char *)dst + start * pyhvd_itemsize(dst_dtype);
        float *to = buffer;
        if (dst_dtype == PYHVD_FLOAT32) to = (float *)(void *)out;
        const float *middle = to;
        if (src_dtype == PYHVD_FLOAT32)
            middle = (const float *)(const void *)in;
        else if (src_dtype == PYHVD_FLOAT64 && is_half(dst_dtype))
            narrow_f64_to_odd(to, (const double *)(const void *)in, n);
        else if (src_dtype == PYHVD_FLOAT64)
            narrow_f64(to, (const double *)(const void *)in, n);
        else
            pyhvd_widener(src_dtype)(to, in, n);
        if (dst_dtype == PYHVD_FLOAT64)
            widen_f64((double *)(void *)out, middle, n);
        else if (is_half(dst_dtype))
            pyhvd_narrower(dst_dtype)(out, middle, n);
    }
    return 0;
}
