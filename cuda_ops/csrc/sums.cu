// What every rank sent of one slice, added up in rank order in fp32.

struct SumSlices {
    const void* in;   // slices of numel elements, one behind the other
    const void* own;  // this rank's, if `in` lacks it, else null
    float* out;
    i64 numel;
    int count;
    int kind;
    int add;  // to what is there, else overwritten
    int rank;  // whose `own` is
};

template <int KIND> __device__ __forceinline__ const void* slice(const SumSlices& a, int r) {
    if (a.own && r == a.rank) return a.own;
    i64 before = a.own && r > a.rank ? r - 1 : r;
    return (const char*)a.in + before * a.numel * Format<KIND>::SIZE;
}

template <int KIND> __device__ void sum(const SumSlices& a) {
    i64 first = blockIdx.x * (i64)CHUNK;
    i64 stop = first + CHUNK < a.numel ? first + CHUNK : a.numel;
    bool vectors = aligned(a.out, 16) && aligned(a.in, 4 * Format<KIND>::SIZE) &&
                   aligned(a.own, 4 * Format<KIND>::SIZE) && a.numel % 4 == 0;
    i64 body = vectors ? stop & ~(i64)3 : first;
#pragma unroll 1
    for (i64 base = first + 4 * (i64)threadIdx.x; base < body; base += 4 * BLOCK * UNROLL) {
        float4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = base + 4 * BLOCK * u;
            if (i < body) x[u] = a.add ? *(const float4*)(a.out + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll 1
        for (int r = 0; r < a.count; r++) {
            const void* in = slice<KIND>(a, r);
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                i64 i = base + 4 * BLOCK * u;
                if (i < body) {
                    float4 y = Format<KIND>::load4(in, i);
                    x[u] = make_float4(x[u].x + y.x, x[u].y + y.y, x[u].z + y.z, x[u].w + y.w);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = base + 4 * BLOCK * u;
            if (i < body) *(float4*)(a.out + i) = x[u];
        }
    }
#pragma unroll 1
    for (i64 i = body + threadIdx.x; i < stop; i += BLOCK) {
        float x = a.add ? a.out[i] : 0.0f;
        for (int r = 0; r < a.count; r++)
            x += Format<KIND>::load(slice<KIND>(a, r), i);
        a.out[i] = x;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) sum_slices(const __grid_constant__ SumSlices a) {
    if (a.kind == BF16) sum<BF16>(a);
    else if (a.kind == FP16) sum<FP16>(a);
    else sum<FP32>(a);
}
