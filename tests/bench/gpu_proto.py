"""Prototype: gathers and exchanges over symmetric memory. gpu_proto.py MODEL MB SEQ modes..."""
import gc, os, sys, time
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm
from gpu_speed import measure, zplan_step
from peers import fsdp2_step
from zplan.runtime import materialize, engine as eng, reducer as red, collectives as col, initialize as ini
from zplan.runtime.mesh import join
from zplan.runtime.unit import Slot
import zplan.runtime.initialize

MODE = {"g": False, "r": False}
SYM = {}
make_ring0 = materialize.make_ring
all_gather0 = col.Collectives.all_gather
exchange0 = col.Collectives.exchange_slices
mesh = None

def sym_buffer(numel, dtype):
    t = symm.empty(numel, dtype=dtype, device=mesh.device)
    h = symm.rendezvous(t, dist.group.WORLD.group_name)
    SYM[t.data_ptr()] = (t, h, [h.get_buffer(r, (numel,), dtype) for r in range(mesh.world_size)])
    return t

def make_ring(placements, choice, arena):
    if not MODE["g"]:
        return make_ring0(placements, choice, arena)
    ring = {}
    for p in placements:
        for k in range(choice.ring_slots if p.ringed else 0):
            if (p.ring, k) not in ring:
                ring[p.ring, k] = Slot(sym_buffer(p.slot_numel, materialize.COMPUTE_DTYPE[choice.precision]))
    return ring

def all_gather(self, pieces, unit):
    pieces = list(pieces)
    found = SYM.get(pieces[0][0].data_ptr()) if MODE["g"] else None
    if found is None:
        return all_gather0(self, pieces, unit)
    t, h, peers = found
    h.barrier(channel=0)
    n, me = mesh.world_size, mesh.rank
    for step in range(1, n):
        peer = (me + step) % n
        for full, own in pieces:
            at = full.storage_offset()
            per = own.numel()
            full[peer * per : (peer + 1) * per].copy_(peers[peer][at + peer * per : at + (peer + 1) * per])
    h.barrier(channel=0)

def exchange(self, received, full, unit):
    found = SYM.get(full.data_ptr()) if MODE["r"] else None
    if found is None:
        return exchange0(self, received, full, unit)
    t, h, peers = found
    n, me = mesh.world_size, mesh.rank
    per = full.numel() // n
    h.barrier(channel=1)
    received[me * per : (me + 1) * per].copy_(full[me * per : (me + 1) * per])
    for step in range(1, n):
        peer = (me + step) % n
        received[peer * per : (peer + 1) * per].copy_(peers[peer][me * per : (me + 1) * per])
    h.barrier(channel=1)

materialize.make_ring = make_ring
col.Collectives.all_gather = all_gather
col.Collectives.exchange_slices = exchange

take0 = None
def hook_arena():
    from zplan.runtime import arena
    take = arena.Arena.take
    keep = {}
    def take2(self, line, numel, dtype, *, fill=None):
        if MODE["r"] and line == "grads.slot":
            if (numel, dtype) not in keep:
                keep[numel, dtype] = sym_buffer(numel, dtype)
            return keep[numel, dtype]
        return take(self, line, numel, dtype, fill=fill)
    arena.Arena.take = take2

def main():
    global mesh
    name, mb, seq, modes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    mesh = join()
    hook_arena()
    for mode in modes:
        MODE["g"], MODE["r"] = "g" in mode.split("-")[0], "r" in mode.split("-")[0]
        stage = 3
        if mode == "fsdp2":
            step, close = fsdp2_step(name, "none", mesh, compiled=False)
        elif mode == "fp":
            step, close = zplan_step(name, mb, "none", stage, compiled=False, reduce="scatter")
        else:
            step, close = zplan_step(name, mb, "none", stage, compiled=False)
        rate, a, r, losses = measure(step, name, mb, seq, mesh)
        close(); del step, close; gc.collect(); torch.cuda.empty_cache()
        if mesh.rank == 0:
            print(f"{mode:9} {name} mb {mb}: {rate:9,.0f} tok/s/GPU alloc {a:6.2f} reserved {r:6.2f} losses {[round(x,4) for x in losses]}", flush=True)
    dist.barrier(); mesh.close()
main()
