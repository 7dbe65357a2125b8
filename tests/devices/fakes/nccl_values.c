/* Values of NCCL's types: each sum is rounded to the type after each addition, as NCCL does. */
#include "fake_nccl.h"

#include <math.h>
#include <string.h>

static const size_t sizes[N_DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

size_t nccl_size(int dtype) { return dtype >= 0 && dtype < N_DTYPES ? sizes[dtype] : 0; }

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static double read_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 31 ? (fraction ? NAN : INFINITY)
                   : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                  : ldexp(fraction, -24);
    return bits & 0x8000 ? -value : value;
}

/* Round to nearest, ties to even; nearbyint() does so in the default mode. */
static uint16_t write_half(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    int exponent;
    if (isnan(value)) return 0x7FFF;
    value = fabs(value);
    if (value >= 65520) return sign | 0x7C00;
    frexp(value, &exponent);
    if (value == 0 || exponent < -13) return sign | (uint16_t)nearbyint(ldexp(value, 24));
    /* A rounded fraction of 2048 carries into the exponent, as it should. */
    return sign | (uint16_t)(((exponent + 13) << 10) + (int)nearbyint(ldexp(value, 11 - exponent)));
}

static uint16_t write_bfloat(float value) {
    uint32_t bits = bits_of_float(value);
    if (isnan(value)) return 0x7FFF;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static int is_float(int dtype) { return dtype >= FLOAT16 && dtype <= BFLOAT16; }

double nccl_read_double(int dtype, const void *value) {
    uint16_t half;
    float single;
    double result = 0;
    switch (dtype) {
    case FLOAT16: memcpy(&half, value, 2); return read_half(half);
    case BFLOAT16: memcpy(&half, value, 2); return float_of_bits((uint32_t)half << 16);
    case FLOAT32: memcpy(&single, value, 4); return single;
    case FLOAT64: memcpy(&result, value, 8); return result;
    default: return 0;
    }
}

static void write_double(int dtype, double value, void *to) {
    uint16_t half = dtype == FLOAT16 ? write_half(value) : write_bfloat((float)value);
    float single = (float)value;
    if (dtype == FLOAT64)
        memcpy(to, &value, 8);
    else if (dtype == FLOAT32)
        memcpy(to, &single, 4);
    else
        memcpy(to, &half, 2);
}

static uint64_t read_integer(int dtype, const void *value) {
    uint64_t bits = 0;
    memcpy(&bits, value, sizes[dtype]);
    if (dtype == INT8) return (uint64_t)(int64_t)(int8_t)bits;
    if (dtype == INT32) return (uint64_t)(int64_t)(int32_t)bits;
    return bits;
}

static double combine_doubles(int op, double a, double b) {
    switch (op) {
    case PROD: return a * b;
    case MAX: return a > b ? a : b;
    case MIN: return a < b ? a : b;
    default: return a + b;
    }
}

static uint64_t combine_integers(int dtype, int op, uint64_t a, uint64_t b) {
    int is_signed = dtype == INT8 || dtype == INT32 || dtype == INT64;
    int less = is_signed ? (int64_t)a < (int64_t)b : a < b;
    switch (op) {
    case PROD: return a * b;
    case MAX: return less ? b : a;
    case MIN: return less ? a : b;
    default: return a + b;
    }
}

/* into = into op with, for one element. A factor has been applied before; so other operations are sums. */
void nccl_combine(int dtype, int op, const unsigned char *with, unsigned char *into) {
    if (is_float(dtype)) {
        double a = nccl_read_double(dtype, into), b = nccl_read_double(dtype, with);
        write_double(dtype, combine_doubles(op, a, b), into);
    } else {
        uint64_t value = combine_integers(dtype, op, read_integer(dtype, into),
                                          read_integer(dtype, with));
        memcpy(into, &value, sizes[dtype]);
    }
}

/* The factor is rounded to the type before, as NCCL does. */
void nccl_scale(int dtype, double factor, const unsigned char *from, unsigned char *to,
                uint64_t n) {
    size_t size = sizes[dtype];
    if (factor == 1 || !is_float(dtype)) {
        memcpy(to, from, n * size);
        return;
    }
    unsigned char rounded[8];
    write_double(dtype, factor, rounded);
    factor = nccl_read_double(dtype, rounded);
    for (uint64_t k = 0; k < n; k++)
        write_double(dtype, factor * nccl_read_double(dtype, from + k * size), to + k * size);
}

/* Divide an integer that is the sum of an average. */
void nccl_divide(int dtype, int n, unsigned char *value) {
    uint64_t sum = read_integer(dtype, value);
    int is_signed = dtype == INT8 || dtype == INT32 || dtype == INT64;
    uint64_t result = is_signed ? (uint64_t)((int64_t)sum / n) : sum / (uint64_t)n;
    memcpy(value, &result, sizes[dtype]);
}
