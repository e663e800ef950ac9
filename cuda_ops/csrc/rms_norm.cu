// RMSNorm of rows and its gradients. A thread holds VECTORS groups of LANES elements of a row in registers, so that every
// input is read once; BLOCK x VECTORS x LANES is at least a row. Compiled for one DTYPE and one shape of threads.
//
// rms_norm: one block a row; keeps 1 / root mean square of each row in fp32.
// rms_norm_backward: each block goes over many rows, and keeps its part of the weight's gradient in registers.
// rms_norm_weight: adds up those parts, in order.

typedef Group<DTYPE, LANES> Elements;

// The sum over the block, in all threads. Blocks come here in a loop, so two arrays take turns.
__device__ __forceinline__ float block_sum(float x, int turn) {
    __shared__ float warps[2][32];
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    if (BLOCK == 32) return x;
    if (threadIdx.x % 32 == 0) warps[turn][threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int w = 0; w < BLOCK / 32; w++) x += warps[turn][w];
    return x;
}

__device__ __forceinline__ int column(int v) { return LANES * (v * BLOCK + threadIdx.x); }

__device__ __forceinline__ void fetch(const void* p, i64 row, int width, float (&x)[VECTORS][LANES]) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
#pragma unroll
        for (int k = 0; k < LANES; k++) x[v][k] = 0.0f;
        if (column(v) < width) Elements::load(p, row * width + column(v), x[v]);
    }
}

struct RmsNorm {
    const void *x, *weight;
    void* y;
    float* rstd;
    int width;
    float eps;
};

static_assert(sizeof(RmsNorm) == 40, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(BLOCK) rms_norm(const __grid_constant__ RmsNorm a) {
    i64 row = blockIdx.x;
    float x[VECTORS][LANES], w[VECTORS][LANES], square = 0.0f;
    fetch(a.x, row, a.width, x);
    fetch(a.weight, 0, a.width, w);  // here, so that they are on their way while threads meet
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int k = 0; k < LANES; k++) square = fmaf(x[v][k], x[v][k], square);
    float rstd = rsqrtf(block_sum(square, 0) / (float)a.width + a.eps);
    if (threadIdx.x == 0) a.rstd[row] = rstd;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (column(v) >= a.width) continue;
#pragma unroll
        for (int k = 0; k < LANES; k++) x[v][k] *= rstd * w[v][k];
        Elements::store(a.y, row * a.width + column(v), x[v]);
    }
}

struct RmsNormBackward {
    const void *grad, *x, *weight;
    const float* rstd;
    void* grad_x;
    float* parts;  // (blocks, width)
    i64 rows;
    int width;
};

static_assert(sizeof(RmsNormBackward) == 64, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(BLOCK) rms_norm_backward(const __grid_constant__ RmsNormBackward a) {
    float w[VECTORS][LANES], part[VECTORS][LANES], x[VECTORS][LANES], g[VECTORS][LANES];
    fetch(a.weight, 0, a.width, w);
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int k = 0; k < LANES; k++) part[v][k] = 0.0f;
    int turn = 0;
#pragma unroll 1
    for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
        fetch(a.x, row, a.width, x);
        fetch(a.grad, row, a.width, g);
        float rstd = a.rstd[row], dot = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int k = 0; k < LANES; k++) {
                x[v][k] *= rstd;
                part[v][k] = fmaf(g[v][k], x[v][k], part[v][k]);
                g[v][k] *= w[v][k];
                dot = fmaf(g[v][k], x[v][k], dot);
            }
        float mean = block_sum(dot, turn) / (float)a.width;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (column(v) >= a.width) continue;
#pragma unroll
            for (int k = 0; k < LANES; k++) g[v][k] = rstd * fmaf(-mean, x[v][k], g[v][k]);
            Elements::store(a.grad_x, row * a.width + column(v), g[v]);
        }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (column(v) < a.width)
#pragma unroll
            for (int k = 0; k < LANES; k++) a.parts[blockIdx.x * (i64)a.width + column(v) + k] = part[v][k];
}

struct RmsNormWeight {
    const float* parts;
    void* grad_weight;
    int num_parts, width;
};

static_assert(sizeof(RmsNormWeight) == 24, "as the host lays it out");

// 32 columns a block, whose parts BLOCK / 32 warps share.
extern "C" __global__ void __launch_bounds__(BLOCK) rms_norm_weight(const __grid_constant__ RmsNormWeight a) {
    __shared__ float sums[BLOCK / 32][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 at = blockIdx.x * (i64)32 + lane;
    float sum = 0.0f;
    if (at < a.width)
#pragma unroll 4
        for (int p = warp; p < a.num_parts; p += BLOCK / 32) sum += a.parts[p * (i64)a.width + at];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || at >= a.width) return;
    sum = 0.0f;
    for (int w = 0; w < BLOCK / 32; w++) sum += sums[w][lane];
    Format<DTYPE>::store(a.grad_weight, at, sum);
}
