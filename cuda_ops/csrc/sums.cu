// A rank's slice of a unit's gradients: its own (fp32, bf16 or fp16, where autograd left them) and what every other rank
// sent, added up in rank order in fp32. On request the squares of the result are summed on the way.
//
// Blocks take chunks in turns. Their number depends on the length alone, so the sum of squares does not depend on the GPU.

struct SumGrads {
    const void* others;  // slices of numel elements, in rank order without this one's
    float* out;          // elements [start, start + numel) of the flat address space
    i64 start, numel;
    int count;  // of ranks
    int rank;
    int kind;  // of the others
    int add;   // to what is there, else overwritten
    Squares squares;
    Entries entries;
};

static_assert(sizeof(SumGrads) == 72 + sizeof(Entries), "as the host lays it out");

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// `count` elements from `at` of the slice on; `grad` begins with the first of them, or is null.
template <int OWN, int KIND> __device__ void sum(const SumGrads& a, const char* grad, i64 at, i64 count, Partial& mine) {
    float* out = a.out + at;
    const char* others = (const char*)a.others + at * Format<KIND>::SIZE;
    bool vectors = aligned(out, 16) && aligned(grad, 4 * Format<OWN>::SIZE) &&
                   aligned(others, 4 * Format<KIND>::SIZE) && a.numel % 4 == 0;
    i64 body = vectors ? count & ~(i64)3 : 0;
#pragma unroll 1
    for (i64 base = 4 * (i64)threadIdx.x; base < body; base += 4 * BLOCK * UNROLL) {
        float4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = base + 4 * BLOCK * u;
            x[u] = a.add && i < body ? *(const float4*)(out + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        const char* other = others;
#pragma unroll 1
        for (int r = 0; r < a.count; r++) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                i64 i = base + 4 * BLOCK * u;
                if (i < body && (r != a.rank || grad))
                    x[u] = plus(x[u], r == a.rank ? Format<OWN>::load4(grad, i) : Format<KIND>::load4(other, i));
            }
            if (r != a.rank) other += a.numel * Format<KIND>::SIZE;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = base + 4 * BLOCK * u;
            if (i < body) {
                *(float4*)(out + i) = x[u];
                if (a.squares.out) add_four(mine, x[u], at + i);
            }
        }
    }
#pragma unroll 1
    for (i64 i = body + threadIdx.x; i < count; i += BLOCK) {
        float x = a.add ? out[i] : 0.0f;
        for (int r = 0; r < a.count; r++) {
            i64 before = (r > a.rank ? r - 1 : r) * a.numel;
            if (r != a.rank) x += Format<KIND>::load(others, before + i);
            else if (grad) x += Format<OWN>::load(grad, i);
        }
        out[i] = x;
        if (a.squares.out) add_one(mine, x, at + i);
    }
}

template <int KIND> __device__ void sum_chunks(const SumGrads& a, Partial& mine) {
    for (i64 first = a.entries.low + blockIdx.x * (i64)CHUNK; first < a.entries.high; first += gridDim.x * (i64)CHUNK) {
        i64 stop = first + CHUNK < a.entries.high ? first + CHUNK : a.entries.high;
        stretches(a.entries, first, stop, [&](const Entry* e, i64 at, i64 count) {
            const char* grad = e ? (const char*)e->grad : 0;
            int kind = grad ? e->kind : KIND;
            if (grad) grad += (at - e->start) * (kind == FP32 ? 4 : 2);
            if (kind == BF16) sum<BF16, KIND>(a, grad, at - a.start, count, mine);
            else if (kind == FP16) sum<FP16, KIND>(a, grad, at - a.start, count, mine);
            else sum<FP32, KIND>(a, grad, at - a.start, count, mine);
        });
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) sum_grads(const __grid_constant__ SumGrads a) {
    Partial mine = {0.0, NONE};
    if (a.kind == BF16) sum_chunks<BF16>(a, mine);
    else if (a.kind == FP16) sum_chunks<FP16>(a, mine);
    else sum_chunks<FP32>(a, mine);
    if (a.squares.out) meet(a.squares, mine);
}
