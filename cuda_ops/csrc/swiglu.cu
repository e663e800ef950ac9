// silu(gate) * up and its gradients, which are written over gate and up. Arithmetic is fp32, rounded once.

struct SwiGlu {
    void *gate, *up;    // the backward overwrites them
    const void* grad;   // of the product; backward only
    void* out;          // forward only
    i64 numel;
    int kind;
    int whole;  // all addresses are multiples of 16 bytes
};

static_assert(sizeof(SwiGlu) == 48, "as the host lays it out");

__device__ __forceinline__ float product(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

__device__ __forceinline__ void gradients(float grad, float& gate, float& up) {
    float share = 1.0f / (1.0f + expf(-gate)), silu = gate * share;
    float of_gate = grad * up * share * (1.0f + gate * (1.0f - share));
    up = grad * silu;
    gate = of_gate;
}

template <int KIND> __device__ void forward(const SwiGlu& a) {
    const int WIDTH = Pack<KIND>::WIDTH;
    i64 body = a.whole ? a.numel & ~(i64)(WIDTH - 1) : 0, start = blockIdx.x * (i64)CHUNK;
    i64 stop = start + CHUNK < body ? start + CHUNK : body;
#pragma unroll 2
    for (i64 i = start + WIDTH * threadIdx.x; i < stop; i += WIDTH * BLOCK) {
        float gate[WIDTH], up[WIDTH];
        Pack<KIND>::load(a.gate, i, gate);
        Pack<KIND>::load(a.up, i, up);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) up[k] = product(gate[k], up[k]);
        Pack<KIND>::store(a.out, i, up);
    }
    i64 end = start + CHUNK < a.numel ? start + CHUNK : a.numel;
    for (i64 i = (body > start ? body : start) + threadIdx.x; i < end; i += BLOCK)
        Format<KIND>::store(a.out, i, product(Format<KIND>::load(a.gate, i), Format<KIND>::load(a.up, i)));
}

template <int KIND> __device__ void backward(const SwiGlu& a) {
    const int WIDTH = Pack<KIND>::WIDTH;
    i64 body = a.whole ? a.numel & ~(i64)(WIDTH - 1) : 0, start = blockIdx.x * (i64)CHUNK;
    i64 stop = start + CHUNK < body ? start + CHUNK : body;
#pragma unroll 2
    for (i64 i = start + WIDTH * threadIdx.x; i < stop; i += WIDTH * BLOCK) {
        float gate[WIDTH], up[WIDTH], grad[WIDTH];
        Pack<KIND>::load(a.gate, i, gate);
        Pack<KIND>::load(a.up, i, up);
        Pack<KIND>::load(a.grad, i, grad);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) gradients(grad[k], gate[k], up[k]);
        Pack<KIND>::store(a.gate, i, gate);
        Pack<KIND>::store(a.up, i, up);
    }
    i64 end = start + CHUNK < a.numel ? start + CHUNK : a.numel;
    for (i64 i = (body > start ? body : start) + threadIdx.x; i < end; i += BLOCK) {
        float gate = Format<KIND>::load(a.gate, i), up = Format<KIND>::load(a.up, i);
        gradients(Format<KIND>::load(a.grad, i), gate, up);
        Format<KIND>::store(a.gate, i, gate);
        Format<KIND>::store(a.up, i, up);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) swiglu(const __grid_constant__ SwiGlu a) {
    if (a.kind == BF16) forward<BF16>(a);
    else if (a.kind == FP16) forward<FP16>(a);
    else forward<FP32>(a);
}

extern "C" __global__ void __launch_bounds__(BLOCK) swiglu_backward(const __grid_constant__ SwiGlu a) {
    if (a.kind == BF16) backward<BF16>(a);
    else if (a.kind == FP16) backward<FP16>(a);
    else backward<FP32>(a);
}
