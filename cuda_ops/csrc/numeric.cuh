// Vector access and 16-bit conversions shared by the kernels. Placed in front of each source; needs no CUDA header.

typedef long long i64;
typedef unsigned long long u64;

enum Kind { FP32 = 0, BF16 = 1, FP16 = 2 };

__device__ __forceinline__ bool aligned(const void* p, unsigned bytes) { return ((u64)p & (bytes - 1)) == 0; }

// What is read or written once and not soon again: marked to leave the caches first, if STREAM says so.
template <class T> __device__ __forceinline__ T pull(const void* p) {
#if STREAM
    return __ldcs((const T*)p);
#else
    return *(const T*)p;
#endif
}

template <class T> __device__ __forceinline__ void push(void* p, T x) {
#if STREAM
    __stcs((T*)p, x);
#else
    *(T*)p = x;
#endif
}

__device__ __forceinline__ unsigned short to_bf16(float x) {
#if __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    // Round to nearest, ties to even, by adding just under half a unit; a NaN must not overflow into an infinity.
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

__device__ __forceinline__ unsigned short to_fp16(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float from_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ __forceinline__ float from_fp16(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

template <int KIND> struct Format;

template <> struct Format<FP32> {
    typedef float Word;
    static const int SIZE = 4;
    static __device__ __forceinline__ float widen(float x) { return x; }
    static __device__ __forceinline__ float narrow(float x) { return x; }
    static __device__ __forceinline__ float load(const void* p, i64 i) { return ((const float*)p)[i]; }
    static __device__ __forceinline__ float4 load4(const void* p, i64 i) {
        return pull<float4>((const float*)p + i);
    }
    static __device__ __forceinline__ void store(void* p, i64 i, float x) { ((float*)p)[i] = x; }
};

template <> struct Format<BF16> {
    typedef unsigned short Word;
    static const int SIZE = 2;
    static __device__ __forceinline__ float widen(unsigned short x) { return from_bf16(x); }
    static __device__ __forceinline__ unsigned short narrow(float x) { return to_bf16(x); }
    static __device__ __forceinline__ float load(const void* p, i64 i) {
        return from_bf16(((const unsigned short*)p)[i]);
    }
    static __device__ __forceinline__ float4 load4(const void* p, i64 i) {
        ushort4 h = pull<ushort4>((const unsigned short*)p + i);
        return make_float4(from_bf16(h.x), from_bf16(h.y), from_bf16(h.z), from_bf16(h.w));
    }
    static __device__ __forceinline__ void store(void* p, i64 i, float x) { ((unsigned short*)p)[i] = to_bf16(x); }
    static __device__ __forceinline__ void store4(void* p, i64 i, float4 x) {
        push((unsigned short*)p + i, make_ushort4(to_bf16(x.x), to_bf16(x.y), to_bf16(x.z), to_bf16(x.w)));
    }
};

template <> struct Format<FP16> {
    typedef unsigned short Word;
    static const int SIZE = 2;
    static __device__ __forceinline__ float widen(unsigned short x) { return from_fp16(x); }
    static __device__ __forceinline__ unsigned short narrow(float x) { return to_fp16(x); }
    static __device__ __forceinline__ float load(const void* p, i64 i) {
        return from_fp16(((const unsigned short*)p)[i]);
    }
    static __device__ __forceinline__ float4 load4(const void* p, i64 i) {
        ushort4 h = pull<ushort4>((const unsigned short*)p + i);
        return make_float4(from_fp16(h.x), from_fp16(h.y), from_fp16(h.z), from_fp16(h.w));
    }
    static __device__ __forceinline__ void store(void* p, i64 i, float x) { ((unsigned short*)p)[i] = to_fp16(x); }
    static __device__ __forceinline__ void store4(void* p, i64 i, float4 x) {
        push((unsigned short*)p + i, make_ushort4(to_fp16(x.x), to_fp16(x.y), to_fp16(x.z), to_fp16(x.w)));
    }
};

// COUNT numbers of one kind that are read or written at once, where their address is a multiple of their size.
template <int KIND, int COUNT> struct Group {
    typedef typename Format<KIND>::Word Word;
    struct __align__(COUNT * sizeof(Word)) Words {
        Word x[COUNT];
    };

    static __device__ __forceinline__ void load(const void* p, i64 i, float* x) {
        Words words = *(const Words*)((const Word*)p + i);
#pragma unroll
        for (int k = 0; k < COUNT; k++) x[k] = Format<KIND>::widen(words.x[k]);
    }

    static __device__ __forceinline__ void store(void* p, i64 i, const float* x) {
        Words words;
#pragma unroll
        for (int k = 0; k < COUNT; k++) words.x[k] = Format<KIND>::narrow(x[k]);
        *(Words*)((Word*)p + i) = words;
    }
};

// 16 bytes of them.
template <int KIND> struct Pack : Group<KIND, 16 / Format<KIND>::SIZE> {
    static const int WIDTH = 16 / Format<KIND>::SIZE;
};
