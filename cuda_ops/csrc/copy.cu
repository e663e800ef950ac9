// Gradients of one unit (fp32, bf16 or fp16) into one flat buffer: written or, where it is fp32, added, with the gaps
// between them zeroed when written. One launch for up to NUM_ENTRIES of them.

struct CopyGrads {
    void* target;    // stands for elements [start, ...) of the flat address space
    i64 start;
    int add;   // only with an fp32 target
    int kind;  // of the target
    Entries entries;
};

static_assert(sizeof(CopyGrads) == 24 + sizeof(Entries), "as the host lays it out");

template <bool ADD> __device__ __forceinline__ void put(float* target, i64 i, float x) {
    target[i] = ADD ? target[i] + x : x;
}

// `count` elements of the gradient from `at` on into `out`.
template <int KIND, bool ADD> __device__ void convert(float* out, const void* grad, i64 at, i64 count) {
    const char* in = (const char*)grad + at * Format<KIND>::SIZE;
    i64 body = aligned(out, 16) && aligned(in, 4 * Format<KIND>::SIZE) ? count & ~(i64)3 : 0;
#pragma unroll 1
    for (i64 base = 4 * (i64)threadIdx.x; base < body; base += 4 * BLOCK * UNROLL) {
        float4 x[UNROLL], y[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = base + 4 * BLOCK * u;
            if (i < body) {
                x[u] = Format<KIND>::load4(in, i);
                if (ADD) y[u] = *(const float4*)(out + i);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = base + 4 * BLOCK * u;
            if (i < body) {
                if (ADD) x[u] = make_float4(y[u].x + x[u].x, y[u].y + x[u].y, y[u].z + x[u].z, y[u].w + x[u].w);
                *(float4*)(out + i) = x[u];
            }
        }
    }
#pragma unroll 1
    for (i64 i = body + threadIdx.x; i < count; i += BLOCK) put<ADD>(out, i, Format<KIND>::load(in, i));
}

// The same 16 bits, moved.
__device__ void move(unsigned short* out, const void* grad, i64 at, i64 count) {
    const unsigned short* in = (const unsigned short*)grad + at;
    i64 body = aligned(out, 16) && aligned(in, 16) ? count & ~(i64)7 : 0;
#pragma unroll 1
    for (i64 base = 8 * (i64)threadIdx.x; base < body; base += 8 * BLOCK * UNROLL) {
        uint4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (base + 8 * BLOCK * u < body) x[u] = pull<uint4>(in + base + 8 * BLOCK * u);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (base + 8 * BLOCK * u < body) *(uint4*)(out + base + 8 * BLOCK * u) = x[u];
    }
#pragma unroll 1
    for (i64 i = body + threadIdx.x; i < count; i += BLOCK) out[i] = in[i];
}

template <int KIND, int OUT> __device__ void narrow(unsigned short* out, const void* grad, i64 at, i64 count) {
#pragma unroll 1
    for (i64 i = threadIdx.x; i < count; i += BLOCK) Format<OUT>::store(out, i, Format<KIND>::load(grad, at + i));
}

template <int OUT> __device__ void segment16(unsigned short* out, const void* grad, int kind, i64 at, i64 count) {
    if (grad == 0) {
        for (i64 i = threadIdx.x; i < count; i += BLOCK) out[i] = 0;
    } else if (kind == OUT) {
        move(out, grad, at, count);
    } else if (kind == FP32) {
        narrow<FP32, OUT>(out, grad, at, count);
    } else {
        narrow<OUT == BF16 ? FP16 : BF16, OUT>(out, grad, at, count);
    }
}

template <bool ADD> __device__ void segment(float* out, const void* grad, int kind, i64 at, i64 count) {
    if (grad == 0) {
        if (!ADD)
            for (i64 i = threadIdx.x; i < count; i += BLOCK) out[i] = 0.0f;
    } else if (kind == BF16) {
        convert<BF16, ADD>(out, grad, at, count);
    } else if (kind == FP16) {
        convert<FP16, ADD>(out, grad, at, count);
    } else {
        convert<FP32, ADD>(out, grad, at, count);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) copy_grads(const __grid_constant__ CopyGrads a) {
    i64 first = a.entries.low + blockIdx.x * (i64)CHUNK;
    i64 stop = first + CHUNK < a.entries.high ? first + CHUNK : a.entries.high;
    stretches(a.entries, first, stop, [&](const Entry* e, i64 at, i64 count) {
        float* out = (float*)a.target + (at - a.start);
        unsigned short* out16 = (unsigned short*)a.target + (at - a.start);
        const void* grad = e ? e->grad : 0;
        int kind = e ? e->kind : FP32;
        i64 from = e ? at - e->start : 0;
        if (a.kind == BF16) segment16<BF16>(out16, grad, kind, from, count);
        else if (a.kind == FP16) segment16<FP16>(out16, grad, kind, from, count);
        else if (a.add) segment<true>(out, grad, kind, from, count);
        else segment<false>(out, grad, kind, from, count);
    });
}
