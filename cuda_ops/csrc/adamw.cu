// AdamW with decoupled weight decay over a list of flat fp32 slices, one launch for all of them.
//
// Each element is read and written once: 28 bytes, or 30 where a 16-bit copy of the new value is kept beside the master;
// a master that is split into its bf16 weight and what that lacks needs no copy. The list is cut into chunks of CHUNK
// elements of one slice each. BLOCK, CHUNK, UNROLL, STREAM, SPLIT and GRAD come with the compiler's options; with SPLIT
// masters are split. GRAD is the kind of the gradients; in 16 bits they take 2 bytes less.

typedef Format<(Kind)GRAD> Grad;

struct Slice {
    void* master;  // float; with SPLIT short: the bits that the bf16 value lacks
    const void* grad;
    float* exp_avg;
    float* exp_avg_sq;
    void* half_copy;  // 16-bit, or null; with SPLIT the upper halves of the masters
    i64 numel;
    i64 first_chunk;
    float lr_scale;
    float weight_decay_scale;
};

static_assert(sizeof(Slice) == 64, "as the host lays it out");

struct AdamW {
    const Slice* slices;
    const float* applied;  // steps applied so far, this one included
    const float* scale;    // gradients are divided by it
    const float* skip;     // not 0: leave everything as it is
    double lr, beta1, beta2, log_beta1, log_beta2, eps, weight_decay;
    i64 num_chunks;
    int num_slices;
    int kind;  // of the 16-bit copies
};

static_assert(sizeof(AdamW) == 104, "as the host lays it out");

struct Coefficients {
    float inverse, inverse_rest, rest1, rest2, step_size, root_correction, eps, decay;
};

// x - (1 - beta) x rounds once and keeps the small factor exact; beta in fp32 would be off by up to 6e-8 in every step,
// always to the same side. A product with the inverse in two parts is as near as a division, and the last quotient,
// two units in the last place of the update, is lost in the weight's own rounding: under load, where clocks are lower,
// divisions cost 4 % of the launch.
__device__ __forceinline__ float advance(float p, float g, float& m, float& v, const Coefficients& c) {
    g = fmaf(g, c.inverse_rest, g * c.inverse);
    p = fmaf(-c.decay, p, p);
    m = fmaf(c.rest1, g, fmaf(-c.rest1, m, m));
    v = fmaf(c.rest2 * g, g, fmaf(-c.rest2, v, v));
    return p - __fdividef(c.step_size * m, fmaf(sqrtf(v), c.root_correction, c.eps));
}

// The two halves of an fp32 number. Exactly between two bf16 numbers the larger magnitude is taken, and a NaN stays one.
// A zero that somebody wrote over an upper half is one, whatever lies under it.
__device__ __forceinline__ float merge(unsigned short high, short low) {
    if (!(high & 0x7fff) && low < 0) low = 0;
    return __uint_as_float(((unsigned)high << 16) + (unsigned)(int)low);
}

__device__ __forceinline__ void split(float x, unsigned short& high, short& low) {
    high = to_bf16(x);
    int rest = x == x ? (int)(__float_as_uint(x) - ((unsigned)high << 16)) : 0;
    high += rest == 0x8000;
    low = (short)rest;
}

__device__ __forceinline__ float4 load_master(const Slice& s, i64 i) {
#if SPLIT
    ushort4 h = pull<ushort4>((const unsigned short*)s.half_copy + i);
    short4 l = pull<short4>((const short*)s.master + i);
    return make_float4(merge(h.x, l.x), merge(h.y, l.y), merge(h.z, l.z), merge(h.w, l.w));
#else
    return pull<float4>((const float*)s.master + i);
#endif
}

__device__ __forceinline__ void store_master(const Slice& s, int kind, i64 i, float4 p) {
#if SPLIT
    ushort4 h;
    short4 l;
    split(p.x, h.x, l.x);
    split(p.y, h.y, l.y);
    split(p.z, h.z, l.z);
    split(p.w, h.w, l.w);
    push((unsigned short*)s.half_copy + i, h);
    push((short*)s.master + i, l);
#else
    push((float*)s.master + i, p);
    if (kind == BF16) Format<BF16>::store4(s.half_copy, i, p);
    if (kind == FP16) Format<FP16>::store4(s.half_copy, i, p);
#endif
}

__device__ __forceinline__ void vectors(const Slice& s, int kind, i64 begin, i64 end, const Coefficients& c) {
#pragma unroll 1
    for (i64 base = begin + 4 * (i64)threadIdx.x; base < end; base += 4 * BLOCK * UNROLL) {
        float4 p[UNROLL], g[UNROLL], m[UNROLL], v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = base + 4 * BLOCK * u;
            if (i < end) {
                g[u] = Grad::load4(s.grad, i);
                p[u] = load_master(s, i);
                m[u] = pull<float4>(s.exp_avg + i);
                v[u] = pull<float4>(s.exp_avg_sq + i);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            i64 i = base + 4 * BLOCK * u;
            if (i < end) {
                p[u].x = advance(p[u].x, g[u].x, m[u].x, v[u].x, c);
                p[u].y = advance(p[u].y, g[u].y, m[u].y, v[u].y, c);
                p[u].z = advance(p[u].z, g[u].z, m[u].z, v[u].z, c);
                p[u].w = advance(p[u].w, g[u].w, m[u].w, v[u].w, c);
                store_master(s, kind, i, p[u]);
                push(s.exp_avg + i, m[u]);
                push(s.exp_avg_sq + i, v[u]);
            }
        }
    }
}

// Elements one by one: `[begin, head)` and `[tail, end)`.
__device__ __forceinline__ void edges(
    const Slice& s, int kind, i64 begin, i64 head, i64 tail, i64 end, const Coefficients& c
) {
#pragma unroll 1
    for (i64 k = threadIdx.x; k < (head - begin) + (end - tail); k += BLOCK) {
        i64 i = k < head - begin ? begin + k : tail + k - (head - begin);
        float m = s.exp_avg[i], v = s.exp_avg_sq[i];
#if SPLIT
        unsigned short* high = (unsigned short*)s.half_copy + i;
        short* low = (short*)s.master + i;
        split(advance(merge(*high, *low), Grad::load(s.grad, i), m, v, c), *high, *low);
#else
        float p = advance(((const float*)s.master)[i], Grad::load(s.grad, i), m, v, c);
        ((float*)s.master)[i] = p;
        if (kind == BF16) Format<BF16>::store(s.half_copy, i, p);
        if (kind == FP16) Format<FP16>::store(s.half_copy, i, p);
#endif
        s.exp_avg[i] = m;
        s.exp_avg_sq[i] = v;
    }
}

// Whole vectors where all arrays reach a 16-byte boundary (8 in 16 bits) at the same element, else one by one.
__device__ __forceinline__ void update(const Slice& s, int kind, i64 begin, i64 end, const Coefficients& c) {
    i64 head = begin + ((0 - ((u64)(s.exp_avg + begin) >> 2)) & 3);
#if SPLIT
    bool whole = aligned((const short*)s.master + head, 8);
#else
    bool whole = aligned((const float*)s.master + head, 16);
#endif
    bool grads = aligned((const char*)s.grad + head * Grad::SIZE, 4 * Grad::SIZE);
    bool fits = head < end && whole && grads && aligned(s.exp_avg + head, 16) &&
                aligned(s.exp_avg_sq + head, 16) &&
                (kind == FP32 || aligned((unsigned short*)s.half_copy + head, 8));
    if (!fits) head = end;
    i64 tail = head + ((end - head) & ~(i64)3);
    vectors(s, kind, head, tail, c);
    edges(s, kind, begin, head, tail, end, c);
}

extern "C" __global__ void __launch_bounds__(BLOCK) adamw(const __grid_constant__ AdamW a) {
    __shared__ Coefficients common;
    if (*a.skip != 0.0f) return;
    if (threadIdx.x == 0) {
        // 1 - beta^t without cancellation: beta^t - 1 = expm1(t log beta).
        double t = *a.applied;
        double inverse = 1.0 / *a.scale;
        common.inverse = (float)inverse;
        common.inverse_rest = (float)(inverse - common.inverse);
        common.rest1 = (float)(1.0 - a.beta1);
        common.rest2 = (float)(1.0 - a.beta2);
        common.step_size = (float)(a.lr / -expm1(t * a.log_beta1));
        common.root_correction = (float)(1.0 / sqrt(-expm1(t * a.log_beta2)));
        common.eps = (float)a.eps;
        common.decay = (float)(a.lr * a.weight_decay);
    }
    __syncthreads();
    for (i64 chunk = blockIdx.x; chunk < a.num_chunks; chunk += gridDim.x) {
        int low = 0, high = a.num_slices - 1;  // the last slice whose first chunk is not past this one
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (a.slices[middle].first_chunk <= chunk) low = middle;
            else high = middle - 1;
        }
        const Slice s = a.slices[low];
        Coefficients c = common;
        c.step_size *= s.lr_scale;
        c.decay *= s.lr_scale * s.weight_decay_scale;
        i64 begin = (chunk - s.first_chunk) * CHUNK;
        i64 end = begin + CHUNK < s.numel ? begin + CHUNK : s.numel;
        update(s, s.half_copy == 0 ? FP32 : a.kind, begin, end, c);
    }
}
