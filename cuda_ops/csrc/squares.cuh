// Sums of squares in float64, in a fixed order, and where the first element lies that is not finite.

static const i64 NONE = 0x7fffffffffffffffLL;

struct Partial {
    double sum;
    i64 bad;  // offset of the first element that is not finite, NONE if all are
};

// Where the blocks of one launch meet.
struct Squares {
    Partial* partials;  // one per block
    unsigned* ticket;   // 0 before and after every launch
    Partial* out;       // null: nobody asks
};

__device__ __forceinline__ Partial join(Partial a, double sum, i64 bad) {
    a.sum += sum;
    a.bad = bad < a.bad ? bad : a.bad;
    return a;
}

// The result is valid in thread 0.
__device__ Partial block_join(Partial mine) {
    __shared__ Partial warps[32];
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        double sum = __shfl_down_sync(0xffffffffu, mine.sum, lanes);
        mine = join(mine, sum, __shfl_down_sync(0xffffffffu, mine.bad, lanes));
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < BLOCK / 32; w++) mine = join(mine, warps[w].sum, warps[w].bad);
    return mine;
}

__device__ __forceinline__ void add_one(Partial& p, float x, i64 i) {
    bool finite = (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
    p = join(p, (double)x * (double)x, finite ? NONE : i);
}

// Four squares are added in fp32 and the rest in float64: an fp64 unit converts one number for four. A sum that is not
// finite (an infinity, a NaN, or values past 1e19) is done again in float64.
__device__ __forceinline__ void add_four(Partial& p, float4 x, i64 i) {
    float sum = fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, x.x * x.x)));
    if ((__float_as_uint(sum) & 0x7f800000u) != 0x7f800000u) {
        p.sum += sum;
        return;
    }
    add_one(p, x.x, i);
    add_one(p, x.y, i + 1);
    add_one(p, x.z, i + 2);
    add_one(p, x.w, i + 3);
}

// All threads of all blocks come here with their shares. Blocks write partials, and the last one to finish adds them in
// a fixed order, so the result never depends on timing.
__device__ __forceinline__ void meet(const Squares& a, Partial mine) {
    mine = block_join(mine);
    __shared__ bool last;
    if (threadIdx.x == 0) {
        a.partials[blockIdx.x] = mine;
        __threadfence();
        last = atomicInc(a.ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    mine = {0.0, NONE};
    for (int b = threadIdx.x; b < gridDim.x; b += BLOCK) {
        volatile Partial* p = a.partials + b;
        mine = join(mine, p->sum, p->bad);
    }
    mine = block_join(mine);
    if (threadIdx.x == 0) *a.out = mine;
}
