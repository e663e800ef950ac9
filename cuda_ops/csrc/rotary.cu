// Rotary embedding of (B, T, H, D), rotating halves: a thread turns LANES pairs. Arithmetic is fp32, rounded once.

typedef Group<DTYPE, LANES> Elements;

struct Rotary {
    const void *x, *cos, *sin;  // cos and sin (T, D/2), in the dtype of x
    void* out;                  // may be x
    i64 groups;                 // B x T x H x D/2 / LANES
    int per_half;               // D/2 / LANES
    int heads, seq;
    float sign;  // -1 turns back
};

static_assert(sizeof(Rotary) == 56, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(BLOCK) rotary(const __grid_constant__ Rotary a) {
    i64 i = blockIdx.x * (i64)BLOCK + threadIdx.x;
    if (i >= a.groups) return;
    i64 row = i / a.per_half;
    int at = (int)(i - row * a.per_half) * LANES, half = a.per_half * LANES;
    i64 token = row / a.heads % a.seq, low = row * 2 * half + at;
    float x[LANES], y[LANES], cos[LANES], sin[LANES];
    Elements::load(a.x, low, x);
    Elements::load(a.x, low + half, y);
    Elements::load(a.cos, token * half + at, cos);
    Elements::load(a.sin, token * half + at, sin);
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        float s = a.sign * sin[k], first = x[k];
        x[k] = first * cos[k] - y[k] * s;
        y[k] = y[k] * cos[k] + first * s;
    }
    Elements::store(a.out, low, x);
    Elements::store(a.out, low + half, y);
}
