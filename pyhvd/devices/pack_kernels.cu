/* Packs tensors into a fusion buffer, and takes them out again, in one launch; scales on the way.
 *
 * NVRTC compiles this file once for each type: PYHVD_TYPE names the struct below that is the type of the tensors
 * and of the buffer. The file includes nothing, and uses only those words of CUDA that every compiler of it
 * defines. Tests define the words as macros, and compile the same loops for the CPU.
 *
 * A *vector* is 16 bytes of the buffer. Every tensor begins with a vector of its own, and every thread moves
 * whole vectors; zeros fill the gap behind a tensor's last element. A *tile* is the work of one block: EACH
 * vectors per thread. The host looks up the tensors of each tile (devices/pack_plan.py). A thread finds the
 * tensor of a vector by a binary search among those; a tile within one large tensor needs no search.
 *
 * CuPy has NVRTC flush subnormal float32 to zero (-ftz=true), which changes every operator on float. Arithmetic
 * on float therefore goes through single(), times() and plus() below.
 */

typedef unsigned long long u64;

/* As devices/pack_plan.py has it. Addresses are aligned to the tensor's element. */
struct Entry {
    u64 address;     /* of the tensor; 0: there is none */
    long long first; /* vector of the buffer with which it begins */
    long long count; /* elements */
};

enum { THREADS = 256 }; /* per block */

union Single {
    float number;
    unsigned bits;
};

/* ---- Arithmetic that keeps subnormals, whatever the compiler is told ---------------------------------------- */

#ifdef __CUDACC__
__device__ static float single(double x)
{
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
}
__device__ static float times(float x, float y)
{
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
    return product;
}
__device__ static float plus(float x, float y)
{
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
    return sum;
}
#else
static float single(double x) { return (float)x; }
static float times(float x, float y) { return x * y; }
static float plus(float x, float y) { return x + y; }
#endif

/* A number times a factor, rounded as the number is. NVRTC warns of a function that a type does not call, but not of
 * a member. */
struct Scaled {
    __device__ static float of(float x, double factor) { return times(x, single(factor)); }
    __device__ static double of(double x, double factor) { return x * factor; }
};

/* ---- Types: what an element is, what it is multiplied as, and how it is rounded -------------------------
 *
 * The rules are those of the host's kernels. float32 and the 16-bit floats take a factor as float32; the 16-bit
 * floats are rounded once, at the end. All other types take it as float64. Integers are rounded toward zero and
 * saturate; a NaN becomes 0.
 */
#define INTEGER(NAME, T, MIN, MAX, TOP)                                                                   \
    struct NAME {                                                                                         \
        typedef T Item;                                                                                   \
        typedef double Wide;                                                                              \
        __device__ static Wide widen(Item x) { return (Wide)x; }                                          \
        __device__ static Item narrow(double x)                                                           \
        {                                                                                                 \
            return x != x ? (Item)0 : x >= (TOP) ? (Item)(MAX) : x <= (double)(MIN) ? (Item)(MIN) : (Item)x; \
        }                                                                                                 \
    };

INTEGER(UINT8, unsigned char, 0, 255, 256.0)
INTEGER(INT8, signed char, -128, 127, 128.0)
INTEGER(UINT16, unsigned short, 0, 65535, 65536.0)
INTEGER(INT16, short, -32768, 32767, 32768.0)
INTEGER(UINT32, unsigned, 0, 4294967295u, 4294967296.0)
INTEGER(INT32, int, -2147483647 - 1, 2147483647, 2147483648.0)
INTEGER(UINT64, u64, 0, 18446744073709551615ull, 18446744073709551616.0)
INTEGER(INT64, long long, -9223372036854775807ll - 1, 9223372036854775807ll, 9223372036854775808.0)

struct FLOAT32 {
    typedef float Item;
    typedef float Wide;
    __device__ static Wide widen(Item x) { return x; }
    __device__ static Item narrow(float x) { return x; }
};

struct FLOAT64 {
    typedef double Item;
    typedef double Wide;
    __device__ static Wide widen(Item x) { return x; }
    __device__ static Item narrow(double x) { return x; }
};

struct FLOAT16 {
    typedef unsigned short Item;
    typedef float Wide;
    __device__ static Wide widen(Item half)
    {
        const unsigned rest = half & 0x7fffu;
        Single x;
        if (rest < 0x400u)
            x.number = times((float)rest, 5.9604644775390625e-8f); /* a subnormal: so many times 2^-24 */
        else
            x.bits = (rest << 13) + (rest < 0x7c00u ? 112u << 23 : 224u << 23);
        x.bits |= (half & 0x8000u) << 16;
        return x.number;
    }
    __device__ static Item narrow(float number)
    {
        Single x;
        x.number = number;
        const unsigned sign = (x.bits >> 16) & 0x8000u, rest = x.bits & 0x7fffffffu;
        if (rest > 0x7f800000u)
            return (Item)(sign | 0x7e00u);
        if (rest >= 0x477ff000u) /* 65520, which would be rounded to 2^16 */
            return (Item)(sign | 0x7c00u);
        if (rest < 0x38800000u) { /* 2^-14: a subnormal; the last bit of 0.5f is worth 2^-24 */
            x.bits = rest;
            x.number = plus(x.number, 0.5f);
            return (Item)(sign | (x.bits - 0x3f000000u));
        }
        return (Item)(sign | ((rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13));
    }
};

struct BFLOAT16 {
    typedef unsigned short Item;
    typedef float Wide;
    __device__ static Wide widen(Item half)
    {
        Single x;
        x.bits = (unsigned)half << 16;
        return x.number;
    }
    __device__ static Item narrow(float number)
    {
        Single x;
        x.number = number;
        if ((x.bits & 0x7fffffffu) > 0x7f800000u)
            return (Item)((x.bits >> 16) | 0x40u);
        return (Item)((x.bits + 0x7fffu + ((x.bits >> 16) & 1u)) >> 16);
    }
};

/* ---- Vectors --------------------------------------------------------------------------------------------- */

typedef PYHVD_TYPE Type;
typedef Type::Item Item;

enum { ITEMS = 16 / sizeof(Item) }; /* elements per vector */

union Vector {
    uint4 word;
    Item item[ITEMS];
};

/* Without a factor the bits move unchanged, also those of a NaN. */
__device__ static Item scaled(Item x, double factor)
{
    return factor == 1.0 ? x : Type::narrow(Scaled::of(Type::widen(x), factor));
}

__device__ static uint4 all_scaled(uint4 word, double factor)
{
    Vector vector;
    vector.word = word;
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        vector.item[i] = scaled(vector.item[i], factor);
    return vector.word;
}

/* ---- Which vector is whose ------------------------------------------------------------------------------- */

/* The last of the entries low .. high that begins at this vector, or before it. */
__device__ static int find(const Entry *entries, int low, int high, long long vector)
{
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (entries[middle].first <= vector)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Whether vectors up to this one, counted from the tensor's first, are whole and aligned. */
__device__ static bool is_plain(const Entry &entry, long long last)
{
    return entry.address != 0 && entry.address % 16 == 0 && (last + 1) * ITEMS <= entry.count;
}

/* ---- One vector, wherever it lies ------------------------------------------------------------------------ */

__device__ static uint4 gather(const Entry &entry, long long vector, const uint4 &neutral, double factor)
{
    if (entry.address == 0)
        return neutral;
    if (is_plain(entry, vector))
        return all_scaled(((const uint4 *)entry.address)[vector], factor);
    Vector to;
    to.word.x = to.word.y = to.word.z = to.word.w = 0;
    const Item *const items = (const Item *)entry.address;
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (vector * ITEMS + i < entry.count)
            to.item[i] = scaled(items[vector * ITEMS + i], factor);
    return to.word;
}

__device__ static void scatter(const Entry &entry, long long vector, uint4 word, double factor)
{
    if (entry.address == 0)
        return;
    Vector from;
    from.word = all_scaled(word, factor);
    if (is_plain(entry, vector)) {
        ((uint4 *)entry.address)[vector] = from.word;
        return;
    }
    Item *const items = (Item *)entry.address;
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (vector * ITEMS + i < entry.count)
            items[vector * ITEMS + i] = from.item[i];
}

/* ---- The kernels ----------------------------------------------------------------------------------------- */

/* A tile of whole vectors within one tensor takes the short way: it starts all loads before it uses one, so
 * that they run at the same time. */
template <int EACH>
__device__ static void pack(uint4 *buffer, const Entry *entries, const int *firsts, long long vectors, uint4 neutral,
                            double factor)
{
    const long long start = (long long)blockIdx.x * THREADS * EACH, end = start + THREADS * EACH;
    const int low = firsts[blockIdx.x], high = firsts[blockIdx.x + 1];
    const Entry only = entries[low];
    if (low == high && is_plain(only, end - 1 - only.first)) {
        const uint4 *const tensor = (const uint4 *)only.address - only.first;
        uint4 loaded[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            loaded[k] = tensor[start + k * THREADS + threadIdx.x];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            buffer[start + k * THREADS + threadIdx.x] = all_scaled(loaded[k], factor);
        return;
    }
    for (long long at = start + threadIdx.x; at < end && at < vectors; at += THREADS) {
        const Entry entry = entries[find(entries, low, high, at)];
        buffer[at] = gather(entry, at - entry.first, neutral, factor);
    }
}

template <int EACH>
__device__ static void unpack(const uint4 *buffer, const Entry *entries, const int *firsts, long long vectors,
                              double factor)
{
    const long long start = (long long)blockIdx.x * THREADS * EACH, end = start + THREADS * EACH;
    const int low = firsts[blockIdx.x], high = firsts[blockIdx.x + 1];
    const Entry only = entries[low];
    if (low == high && is_plain(only, end - 1 - only.first)) {
        uint4 *const tensor = (uint4 *)only.address - only.first;
        uint4 loaded[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            loaded[k] = buffer[start + k * THREADS + threadIdx.x];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            tensor[start + k * THREADS + threadIdx.x] = all_scaled(loaded[k], factor);
        return;
    }
    for (long long at = start + threadIdx.x; at < end && at < vectors; at += THREADS) {
        const Entry entry = entries[find(entries, low, high, at)];
        scatter(entry, at - entry.first, buffer[at], factor);
    }
}

/* firsts has one number more than there are blocks: the entry in which each tile begins, and the last entry.
 * neutral_low and neutral_high are the halves of a vector of a missing tensor. Small tiles spread little work
 * over more blocks. */
#define KERNELS(SUFFIX, EACH)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                 \
        pyhvd_pack_##SUFFIX(u64 buffer, u64 entries, u64 firsts, long long vectors, u64 neutral_low,      \
                            u64 neutral_high, double factor)                                              \
    {                                                                                                     \
        uint4 neutral;                                                                                    \
        neutral.x = (unsigned)neutral_low;                                                                \
        neutral.y = (unsigned)(neutral_low >> 32);                                                        \
        neutral.z = (unsigned)neutral_high;                                                               \
        neutral.w = (unsigned)(neutral_high >> 32);                                                       \
        pack<EACH>((uint4 *)buffer, (const Entry *)entries, (const int *)firsts, vectors, neutral, factor); \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                 \
        pyhvd_unpack_##SUFFIX(u64 buffer, u64 entries, u64 firsts, long long vectors, double factor)      \
    {                                                                                                     \
        unpack<EACH>((const uint4 *)buffer, (const Entry *)entries, (const int *)firsts, vectors, factor); \
    }

KERNELS(small, 1)
KERNELS(large, 4)
