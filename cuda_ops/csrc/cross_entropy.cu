// Cross-entropy of rows of logits, which are overwritten by their gradients, and the factor on gradients afterwards.
//
// cross_entropy: one block a row. A first pass takes the largest logit and the sum of exponentials to it as it goes, a
// second one, whose reads mostly hit the L2 cache, writes softmax minus target. Arithmetic is fp32.
// rescale: gradients times two scalars that lie on the device, converted.

static const float LOG2E = 1.4426950408889634f;
#define INFINITE __uint_as_float(0x7f800000u)
#define NOT_A_NUMBER __uint_as_float(0x7fffffffu)

// Of some logits: the largest, the sum of exp(x - largest), and the sum of all.
struct Row {
    float most, sum, total;
};

// Logits of -inf alone weigh nothing, and must not become inf - inf. One of +inf makes everything NaN, as it should.
__device__ __forceinline__ float base_of(float most) { return most == -INFINITE ? 0.0f : most; }

// exp(x - base): the difference first, so that it is exactly 1 where both are equal. A product of x and log2(e) less one
// of the base would be off by the rounding of the latter, once more in every join.
__device__ __forceinline__ float share(float x, float base) { return exp2f((x - base) * LOG2E); }

__device__ __forceinline__ Row join(Row a, Row b) {
    float most = fmaxf(a.most, b.most), base = base_of(most);
    float sum = a.sum * share(a.most, base) + b.sum * share(b.most, base);
    return {most, sum, a.total + b.total};
}

// Valid in all threads.
__device__ Row block_join(Row mine) {
    __shared__ Row warps[32];
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        Row other = {
            __shfl_xor_sync(0xffffffffu, mine.most, lanes),
            __shfl_xor_sync(0xffffffffu, mine.sum, lanes),
            __shfl_xor_sync(0xffffffffu, mine.total, lanes),
        };
        mine = join(mine, other);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = warps[0];
    for (int w = 1; w < BLOCK / 32; w++) mine = join(mine, warps[w]);
    return mine;
}

template <int COUNT> __device__ __forceinline__ void take(Row& r, const float* x) {
    float most = r.most;
#pragma unroll
    for (int k = 0; k < COUNT; k++) most = fmaxf(most, x[k]);
    float base = base_of(most);
    if (most > r.most) {
        r.sum *= share(r.most, base);
        r.most = most;
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        r.sum += share(x[k], base);
        r.total += x[k];
    }
}

struct CrossEntropy {
    void* logits;       // rows of `stride` elements, each 16-byte aligned; the first `vocab` of a row count
    const i64* target;  // one a row
    float* loss;        // one a row
    i64 stride, vocab, ignore;
    float smoothing;
    int kind;
    int grads;  // overwrite the logits by gradients
};

static_assert(sizeof(CrossEntropy) == 64, "as the host lays it out");

template <int KIND> __device__ __forceinline__ Row first_pass(const void* row, i64 vocab) {
    const int WIDTH = Pack<KIND>::WIDTH;
    Row mine = {-INFINITE, 0.0f, 0.0f};
    i64 body = vocab & ~(i64)(WIDTH - 1);
#pragma unroll 1
    for (i64 first = WIDTH * (i64)threadIdx.x; first < body; first += WIDTH * BLOCK * UNROLL) {
        float x[UNROLL][8];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = first + WIDTH * BLOCK * u;
            if (i < body) Pack<KIND>::load(row, i, x[u]);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (first + WIDTH * BLOCK * u < body) take<WIDTH>(mine, x[u]);
    }
    if (threadIdx.x < vocab - body) {
        float x = Format<KIND>::load(row, body + threadIdx.x);
        take<1>(mine, &x);
    }
    return block_join(mine);
}

// `scale` is 0 for a row that does not count: its logits may be anything.
template <int KIND>
__device__ __forceinline__ void second_pass(
    void* row, i64 vocab, i64 target, float base, float scale, float even, float hit
) {
    const int WIDTH = Pack<KIND>::WIDTH;
    i64 body = vocab & ~(i64)(WIDTH - 1);
#pragma unroll 1
    for (i64 first = WIDTH * (i64)threadIdx.x; first < body; first += WIDTH * BLOCK * UNROLL) {
        float x[UNROLL][8];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = first + WIDTH * BLOCK * u;
            if (i < body) Pack<KIND>::load(row, i, x[u]);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = first + WIDTH * BLOCK * u;
            if (i >= body) continue;
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                float y = scale == 0.0f ? 0.0f : fmaf(share(x[u][k], base), scale, -even);
                x[u][k] = i + k == target ? y - hit : y;
            }
            Pack<KIND>::store(row, i, x[u]);
        }
    }
    if (threadIdx.x < vocab - body) {
        i64 i = body + threadIdx.x;
        float x = Format<KIND>::load(row, i);
        float y = scale == 0.0f ? 0.0f : fmaf(share(x, base), scale, -even);
        Format<KIND>::store(row, i, i == target ? y - hit : y);
    }
}

template <int KIND> __device__ void one_row(const CrossEntropy& a) {
    char* row = (char*)a.logits + blockIdx.x * a.stride * Format<KIND>::SIZE;
    i64 target = a.target[blockIdx.x];
    if (target == a.ignore) {
        if (threadIdx.x == 0) a.loss[blockIdx.x] = 0.0f;
        if (a.grads) second_pass<KIND>(row, a.vocab, -1, 0.0f, 0.0f, 0.0f, 0.0f);
        return;
    }
    bool known = target >= 0 && target < a.vocab;
    float chosen = known ? Format<KIND>::load(row, target) : NOT_A_NUMBER;
    Row all = first_pass<KIND>(row, a.vocab);  // a barrier: from here on the row may be overwritten
    float base = base_of(all.most), hit = 1.0f - a.smoothing;
    if (threadIdx.x == 0) {
        float loss = all.most + logf(all.sum) - hit * chosen;
        if (a.smoothing > 0.0f) loss -= a.smoothing * (all.total / (float)a.vocab);
        a.loss[blockIdx.x] = loss;
    }
    float scale = known ? 1.0f / all.sum : NOT_A_NUMBER;
    if (a.grads) second_pass<KIND>(row, a.vocab, target, base, scale, a.smoothing / (float)a.vocab, hit);
}

// Two blocks a multiprocessor at least, where they are not larger than half of one.
extern "C" __global__ void __launch_bounds__(BLOCK, 1024 / BLOCK) cross_entropy(const __grid_constant__ CrossEntropy a) {
    if (a.kind == BF16) one_row<BF16>(a);
    else if (a.kind == FP16) one_row<FP16>(a);
    else one_row<FP32>(a);
}

struct Rescale {
    const void* in;  // 16-byte aligned, as `out`, which may be the same
    void* out;
    const float *first, *second;  // the factors
    i64 numel;
    int in_kind, out_kind;
};

static_assert(sizeof(Rescale) == 48, "as the host lays it out");

template <int IN, int OUT> __device__ void rescale_all(const Rescale& a, float factor) {
    const int WIDTH = 8;
    i64 body = a.numel & ~(i64)(WIDTH - 1);
    i64 step = WIDTH * BLOCK * (i64)gridDim.x;
#pragma unroll 1
    for (i64 i = WIDTH * (blockIdx.x * (i64)BLOCK + threadIdx.x); i < body; i += step) {
        float x[WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; k += Pack<IN>::WIDTH) Pack<IN>::load(a.in, i + k, x + k);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) x[k] *= factor;
#pragma unroll
        for (int k = 0; k < WIDTH; k += Pack<OUT>::WIDTH) Pack<OUT>::store(a.out, i + k, x + k);
    }
    if (blockIdx.x == 0 && threadIdx.x < a.numel - body) {
        i64 i = body + threadIdx.x;
        Format<OUT>::store(a.out, i, Format<IN>::load(a.in, i) * factor);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) rescale(const __grid_constant__ Rescale a) {
    float factor = *a.first * *a.second;
    if (factor == 1.0f && a.in == a.out) return;
    if (a.in_kind == BF16) rescale_all<BF16, BF16>(a, factor);
    else if (a.in_kind == FP16) rescale_all<FP16, FP16>(a, factor);
    else if (a.out_kind == BF16) rescale_all<FP32, BF16>(a, factor);
    else if (a.out_kind == FP16) rescale_all<FP32, FP16>(a, factor);
    else rescale_all<FP32, FP32>(a, factor);
}
