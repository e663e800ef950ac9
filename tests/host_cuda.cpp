// Runs a kernel's blocks one after another, and each block's threads as fibers of one host thread.
//
// A warp goes on alone for as long as it can, up to a barrier of the block; then comes the next. So warps are as far
// apart as barriers allow, and what one reads too early or writes too soon shows. `backwards` turns the order of
// blocks, warps and lanes round, for what shows only in the other order. Nothing depends on time.

#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "host_cuda.h"

HostIndex threadIdx, blockIdx, blockDim, gridDim;

namespace {

const unsigned MAX_THREADS = 1024, LANES = 32, STACK = 1 << 17, GUARD = 1 << 16;

enum State { READY, AT_BLOCK, AT_WARP, RETURNED };

struct Thread {
    State state;
    int line;  // where it waits
    unsigned mask, source;
    host_word value;
    bool started;
    ucontext_t entry;
    jmp_buf at;
};

Thread threads[MAX_THREADS];
char* stacks;
jmp_buf scheduler;
unsigned current;
HostBody body;
const void* params;
char message[400];

[[noreturn]] void fail() {
    // The fibers of this launch are given up where they are; new ones begin on their stacks.
    for (Thread& t : threads) t.started = false;
    _longjmp(scheduler, 2);
}

__attribute__((noinline)) void pause() {
    if (!_setjmp(threads[current].at)) _longjmp(scheduler, 1);
}

void fiber() {
    for (;;) {
        body(params);
        threads[current].state = RETURNED;
        pause();
    }
}

// False where the thread failed.
__attribute__((noinline)) bool resume(unsigned t) {
    current = threadIdx.x = t;
    if (int how = _setjmp(scheduler)) return how == 1;
    if (threads[t].started) _longjmp(threads[t].at, 1);
    threads[t].started = true;
    getcontext(&threads[t].entry);
    threads[t].entry.uc_stack.ss_sp = stacks + t * (STACK + GUARD) + GUARD;
    threads[t].entry.uc_stack.ss_size = STACK;
    makecontext(&threads[t].entry, fiber, 0);
    setcontext(&threads[t].entry);
    return false;
}

bool together(const Thread& a, const Thread& b) {
    return b.state == a.state && b.line == a.line && (a.state == AT_BLOCK || b.mask == a.mask);
}

// Hands out values where all lanes of a mask have come to the same shuffle. Whether there was one.
bool release_warp(unsigned first) {
    bool any = false;
    for (unsigned lane = 0; lane < LANES && first + lane < blockDim.x; lane++) {
        Thread& t = threads[first + lane];
        if (t.state != AT_WARP) continue;
        bool all = true;
        host_word values[LANES];
        for (unsigned l = 0; l < LANES && all; l++) {
            if (!(t.mask >> l & 1)) continue;
            all = first + l < blockDim.x && together(t, threads[first + l]);
            values[l] = threads[first + l].value;
        }
        if (!all) continue;
        unsigned mask = t.mask;
        for (unsigned l = 0; l < LANES; l++) {
            if (!(mask >> l & 1)) continue;
            threads[first + l].value = values[threads[first + l].source];
            threads[first + l].state = READY;
        }
        any = true;
    }
    return any;
}

bool run_warp(unsigned first, bool backwards) {
    unsigned lanes = blockDim.x - first < LANES ? blockDim.x - first : LANES;
    do {
        for (unsigned l = 0; l < lanes; l++) {
            unsigned t = first + (backwards ? lanes - 1 - l : l);
            if (threads[t].state == READY && !resume(t)) return false;
        }
    } while (release_warp(first));
    return true;
}

int describe(char* out, unsigned t) {
    if (threads[t].state == RETURNED) return snprintf(out, 100, "thread %u has returned", t);
    const char* what = threads[t].state == AT_BLOCK ? "block" : "warp";
    return snprintf(out, 100, "thread %u waits for its %s at line %d", t, what, threads[t].line);
}

// No thread can go on: a barrier that all of those left have reached, the end, or a hang. Whether there is more to do.
bool release_block() {
    bool warp = false;
    unsigned waits = MAX_THREADS, odd = MAX_THREADS;  // a thread that waits, and one for which it does so in vain
    for (unsigned t = blockDim.x; t-- > 0;)
        if (threads[t].state != RETURNED && (threads[t].state == AT_WARP || !warp)) {
            waits = t;
            warp = threads[t].state == AT_WARP;
        }
    if (waits == MAX_THREADS) return false;
    for (unsigned t = blockDim.x; t-- > 0;) {
        // Hardware asks of a barrier only those that are left, of a shuffle all of the mask.
        bool asked = threads[t].state != RETURNED;
        if (warp) asked = t / LANES == waits / LANES && threads[waits].mask >> t % LANES & 1;
        if (asked && !together(threads[waits], threads[t])) odd = t;
    }
    if (odd == MAX_THREADS && !warp) {
        for (unsigned t = 0; t < blockDim.x; t++)
            if (threads[t].state == AT_BLOCK) threads[t].state = READY;
        return true;
    }
    int length = snprintf(message, 100, "block %u: ", blockIdx.x);
    length += describe(message + length, waits);
    if (odd == MAX_THREADS) {
        const char* form = ", and mask %08x asks for lanes that its warp does not have";
        snprintf(message + length, 100, form, threads[waits].mask);
    } else {
        length += snprintf(message + length, 100, ", but ");
        describe(message + length, odd);
    }
    for (Thread& t : threads) t.started = false;
    return false;
}

bool run_block(bool backwards) {
    unsigned warps = (blockDim.x + LANES - 1) / LANES;
    for (unsigned t = 0; t < blockDim.x; t++) threads[t].state = READY;
    do {
        for (unsigned w = 0; w < warps; w++)
            if (!run_warp((backwards ? warps - 1 - w : w) * LANES, backwards)) return false;
    } while (release_block());
    return !message[0];
}

// What all of the sanitizer's reports begin with.
struct Place {
    const char* file;
    unsigned line, column;
};

[[noreturn]] void report(const char* what, const Place* place) {
    snprintf(message, sizeof message, "block %u: thread %u %s at line %u", blockIdx.x, current, what, place->line);
    fail();
}

}  // namespace

extern "C" {

void host_block_barrier(int line) {
    threads[current].state = AT_BLOCK;
    threads[current].line = line;
    pause();
}

host_word host_warp_exchange(int line, unsigned mask, unsigned source, host_word value) {
    if (!(mask >> current % LANES & 1) || source >= LANES || !(mask >> source & 1)) {
        const char* form = "block %u: thread %u shuffles with lane %u and mask %08x at line %d";
        snprintf(message, sizeof message, form, blockIdx.x, current, source, mask, line);
        fail();
    }
    Thread& t = threads[current];
    t.state = AT_WARP;
    t.line = line;
    t.mask = mask;
    t.source = source;
    t.value = value;
    pause();
    return threads[current].value;
}

// g++ calls these with `-fsanitize=alignment,bounds`, in place of a library's that print and go on.
void __ubsan_handle_type_mismatch_v1(const Place* place, void*) { report("uses a misaligned address", place); }
void __ubsan_handle_out_of_bounds(const Place* place, void*) { report("is past the end of an array", place); }

const char* host_run(HostBody kernel, const void* arguments, unsigned grid, unsigned block, int backwards, char* shared,
                     unsigned long shared_bytes) {
    message[0] = 0;
    body = kernel;
    params = arguments;
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    if (!stacks) {
        const unsigned long bytes = MAX_THREADS * (unsigned long)(STACK + GUARD);
        stacks = (char*)mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == (char*)MAP_FAILED) return stacks = 0, "no memory for the threads' stacks";
        // Pages below each stack that nobody may touch, whatever their size.
        for (unsigned t = 0; t < MAX_THREADS; t++)
            if (mprotect(stacks + t * (unsigned long)(STACK + GUARD), GUARD, PROT_NONE)) return "no guard for a stack";
    }
    for (unsigned i = 0; i < grid; i++) {
        blockIdx.x = backwards ? grid - 1 - i : i;
        memset(shared, 0xff, shared_bytes);
        if (!run_block(backwards)) return message;
    }
    return 0;
}
}
