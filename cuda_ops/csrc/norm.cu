// Sum of squares of gradient slices in float64, and where the first element lies that is not finite.
//
// square_sum: one launch a slice. Its grid depends on the length alone, so the result does not depend on the GPU.
// total_sum: adds the slices' sums. settle: the scalars of the optimizer step.

struct SquareSum {
    const void* x;
    i64 numel;
    Squares squares;
    int kind;
    int unused;
};

static_assert(sizeof(SquareSum) == 48, "as the host lays it out");

// This thread's share. A bf16 value and the fp32 number that equals it give the same bits.
template <int KIND> __device__ __forceinline__ Partial share(const SquareSum& a) {
    typedef Format<KIND> F;
    Partial mine = {0.0, NONE};
    i64 head = (0 - (u64)a.x / F::SIZE) & 3;
    if (head > a.numel) head = a.numel;
    i64 tail = head + ((a.numel - head) & ~(i64)3);
    i64 step = 4 * BLOCK * (i64)gridDim.x;
#pragma unroll 1
    for (i64 base = head + 4 * (blockIdx.x * (i64)BLOCK + threadIdx.x); base < tail; base += step * UNROLL) {
        float4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            x[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (base + step * u < tail) x[u] = F::load4(a.x, base + step * u);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) add_four(mine, x[u], base + step * u);
    }
    if (blockIdx.x == 0) {
        if (threadIdx.x < head) add_one(mine, F::load(a.x, threadIdx.x), threadIdx.x);
        if (threadIdx.x < a.numel - tail) add_one(mine, F::load(a.x, tail + threadIdx.x), tail + threadIdx.x);
    }
    return mine;
}

extern "C" __global__ void __launch_bounds__(BLOCK) square_sum(const __grid_constant__ SquareSum a) {
    Partial mine;
    if (a.kind == BF16) mine = share<BF16>(a);
    else if (a.kind == FP16) mine = share<FP16>(a);
    else mine = share<FP32>(a);
    meet(a.squares, mine);
}

struct TotalSum {
    const Partial* rows;
    i64 num_rows;
    double* total;
    i64* first;  // row and offset of the first element that is not finite, -1 and -1 if there is none
};

// One block.
extern "C" __global__ void __launch_bounds__(BLOCK) total_sum(const __grid_constant__ TotalSum a) {
    Partial mine = {0.0, NONE};
    for (i64 r = threadIdx.x; r < a.num_rows; r += BLOCK)
        mine = join(mine, a.rows[r].sum, a.rows[r].bad == NONE ? NONE : r);
    mine = block_join(mine);
    if (threadIdx.x != 0) return;
    *a.total = mine.sum;
    a.first[0] = mine.bad == NONE ? -1 : mine.bad;
    a.first[1] = mine.bad == NONE ? -1 : a.rows[mine.bad].bad;
}

struct Settle {
    const double* total;  // over all ranks
    float *applied, *norm, *coefficient, *scale, *skip;
    double mean, clip;  // factor that turns sums into means; clip <= 0: none
};

// One thread.
extern "C" __global__ void settle(const __grid_constant__ Settle a) {
    float norm = (float)(sqrt(*a.total) * a.mean);
    bool finite = (__float_as_uint(norm) & 0x7f800000u) != 0x7f800000u;
    float coefficient = 1.0f;
    if (a.clip > 0.0) {
        coefficient = (float)a.clip / (norm + 1e-6f);
        coefficient = coefficient > 1.0f ? 1.0f : coefficient;
    }
    *a.norm = norm;
    *a.coefficient = coefficient;
    *a.scale = (float)(1.0 / ((double)coefficient * a.mean));
    *a.skip = finite ? 0.0f : 1.0f;
    *a.applied += finite ? 1.0f : 0.0f;
}
