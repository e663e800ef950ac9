// Gradients of one unit (fp32, bf16 or fp16, each where autograd left it) into one flat buffer: written or, where it is
// fp32, added, with the gaps between them zeroed when written. One launch for up to NUM_ENTRIES of them; the list is its
// argument.

struct Entry {
    const void* grad;  // contiguous; null: counts as zeros
    i64 start, end;    // where it lies in the unit's flat address space, in elements
    int kind;
};

struct CopyGrads {
    void* target;    // stands for elements [start, end) of the flat address space
    i64 start, end;  // of the target
    i64 low, high;    // the part of it that this launch writes
    int num_entries;
    int add;  // only with an fp32 target
    int kind;  // of the target
    int unused;
    Entry entries[NUM_ENTRIES];
};

static_assert(sizeof(Entry) == 32 && sizeof(CopyGrads) == 56 + 32 * NUM_ENTRIES, "as the host lays it out");

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

template <int OUT> __device__ void segment16(unsigned short* out, const Entry& e, i64 at, i64 count) {
    if (e.grad == 0) {
        for (i64 i = threadIdx.x; i < count; i += BLOCK) out[i] = 0;
    } else if (e.kind == OUT) {
        move(out, e.grad, at, count);
    } else if (e.kind == FP32) {
        narrow<FP32, OUT>(out, e.grad, at, count);
    } else {
        narrow<OUT == BF16 ? FP16 : BF16, OUT>(out, e.grad, at, count);
    }
}

template <bool ADD> __device__ void segment(float* out, const Entry& e, i64 at, i64 count) {
    if (e.grad == 0) {
        if (!ADD)
            for (i64 i = threadIdx.x; i < count; i += BLOCK) out[i] = 0.0f;
    } else if (e.kind == BF16) {
        convert<BF16, ADD>(out, e.grad, at, count);
    } else if (e.kind == FP16) {
        convert<FP16, ADD>(out, e.grad, at, count);
    } else {
        convert<FP32, ADD>(out, e.grad, at, count);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) copy_grads(const __grid_constant__ CopyGrads a) {
    i64 at = a.low + blockIdx.x * (i64)CHUNK;
    i64 stop = at + CHUNK < a.high ? at + CHUNK : a.high;
    int e = 0, high = a.num_entries;  // the first entry that ends past `at`
    while (e < high) {
        int middle = (e + high) / 2;
        if (a.entries[middle].end > at) high = middle;
        else e = middle + 1;
    }
    while (at < stop) {
        i64 next;
        float* out = (float*)a.target + (at - a.start);
        unsigned short* out16 = (unsigned short*)a.target + (at - a.start);
        if (e < a.num_entries && a.entries[e].start <= at) {
            next = a.entries[e].end < stop ? a.entries[e].end : stop;
            i64 from = at - a.entries[e].start, count = next - at;
            if (a.kind == BF16) segment16<BF16>(out16, a.entries[e], from, count);
            else if (a.kind == FP16) segment16<FP16>(out16, a.entries[e], from, count);
            else if (a.add) segment<true>(out, a.entries[e], from, count);
            else segment<false>(out, a.entries[e], from, count);
            e++;
        } else {
            next = e < a.num_entries && a.entries[e].start < stop ? a.entries[e].start : stop;
            if (a.kind != FP32)
                for (i64 i = threadIdx.x; i < next - at; i += BLOCK) out16[i] = 0;
            else if (!a.add)
                for (i64 i = threadIdx.x; i < next - at; i += BLOCK) out[i] = 0.0f;
        }
        at = next;
    }
}
