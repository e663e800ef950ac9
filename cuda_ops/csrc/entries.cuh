// Gradients of one unit, each where autograd left it, as one flat address space. The list is a kernel's argument.

struct Entry {
    const void* grad;  // contiguous; null: counts as zeros
    i64 start, end;    // where it lies in the unit's flat address space, in elements
    int kind;
};

struct Entries {
    i64 low, high;  // the part of the address space that this launch is about
    int num;
    int unused;
    Entry of[NUM_ENTRIES];
};

static_assert(sizeof(Entries) == 24 + 32 * NUM_ENTRIES, "as the host lays it out");

// The first entry that ends past an element.
__device__ __forceinline__ int first_past(const Entries& a, i64 at) {
    int e = 0, high = a.num;
    while (e < high) {
        int middle = (e + high) / 2;
        if (a.of[middle].end > at) high = middle;
        else e = middle + 1;
    }
    return e;
}

// Goes over [at, stop) in stretches: `act(entry or null, element, count)`, null where no gradient lies.
template <class Act> __device__ __forceinline__ void stretches(const Entries& a, i64 at, i64 stop, Act act) {
    for (int e = first_past(a, at); at < stop;) {
        bool inside = e < a.num && a.of[e].start <= at;
        i64 border = e >= a.num ? stop : inside ? a.of[e].end : a.of[e].start;
        i64 next = border < stop ? border : stop;
        act(inside ? &a.of[e] : 0, at, next - at);
        e += inside;
        at = next;
    }
}
