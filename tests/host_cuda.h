// What the kernels' sources use of CUDA, for g++: see `host_kernels.py`. Threads are fibers of `host_cuda.cpp`.
// A name that is missing here is a compiler's error, not a silence.

typedef unsigned long long host_word;

struct HostIndex {
    unsigned x, y, z;
};

extern HostIndex threadIdx, blockIdx, blockDim, gridDim;

extern "C" {
typedef void (*HostBody)(const void* params);
// Null, or what went wrong.
const char* host_run(HostBody body, const void* params, unsigned grid, unsigned block, int backwards, char* shared,
                     unsigned long shared_bytes);
void host_block_barrier(int line);
host_word host_warp_exchange(int line, unsigned mask, unsigned source, host_word value);

float fmaf(float, float, float);
float fmaxf(float, float);
float sqrtf(float);
float expf(float);
float exp2f(float);
float logf(float);
double sqrt(double);
double expm1(double);
}

#define __CUDA_ARCH__ 750  // below 800 the sources have C++ in place of some PTX
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// All of a source's in one section, so that it can be filled with garbage before each block.
#define __shared__ static __attribute__((section("host_shared")))

#define __syncthreads() host_block_barrier(__LINE__)
#define __threadfence() ((void)0)
#define __shfl_xor_sync(...) host_shuffle_xor(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) host_shuffle_down(__LINE__, __VA_ARGS__)

namespace {

template <class T> T host_shuffle(int line, unsigned mask, T x, unsigned source) {
    static_assert(sizeof(T) <= sizeof(host_word), "one word at most");
    host_word word = 0;
    __builtin_memcpy(&word, &x, sizeof x);
    word = host_warp_exchange(line, mask, source, word);
    __builtin_memcpy(&x, &word, sizeof x);
    return x;
}

template <class T> T host_shuffle_xor(int line, unsigned mask, T x, unsigned lanes) {
    return host_shuffle(line, mask, x, threadIdx.x % 32 ^ lanes);
}

// Past the warp's end a lane gets its own value back.
template <class T> T host_shuffle_down(int line, unsigned mask, T x, unsigned lanes) {
    unsigned lane = threadIdx.x % 32;
    return host_shuffle(line, mask, x, lane + lanes < 32 ? lane + lanes : lane);
}

// Aligned as there: an access at an address that is no multiple of it is found.
struct __align__(16) float4 {
    float x, y, z, w;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
struct __align__(8) ushort4 {
    unsigned short x, y, z, w;
};
struct __align__(8) short4 {
    short x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
    return {x, y, z, w};
}

template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T x) { *p = x; }

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }

// Blocks come one after another.
inline unsigned atomicInc(unsigned* p, unsigned limit) {
    unsigned before = *p;
    *p = before >= limit ? 0 : before + 1;
    return before;
}

inline unsigned short ptx_cvt_rn_f16_f32(float x) {
    unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7fff;
    if (size >= 0x47800000) return sign | 0x7c00;  // 2^16
    // Below 2^-14 fp16 counts in 2^-24, as fp32 does from a half on.
    if (size < 0x38800000) return sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000);
    return sign | ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10);
}

inline float ptx_cvt_f32_f16(unsigned short bits) {
    unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, rest = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | rest << 13);
    float size = exponent ? __uint_as_float((exponent + 112) << 23 | rest << 13) : rest * 0x1p-24f;
    return __uint_as_float(sign | __float_as_uint(size));
}

template <class P> void host_call(void (*kernel)(P), const void* params) { kernel(*(const P*)params); }

}  // namespace
