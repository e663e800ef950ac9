import gc

import torch

from zplan.runtime.meter import StorageRegistry


def test_live_bytes_follow_births_and_deaths():
    with StorageRegistry() as registry:
        a = torch.zeros(100)
        b = a + 1
        assert registry.live_bytes == 800
        del a
        assert registry.live_bytes == 400
        view = b[10:20]
        del b
        assert registry.live_bytes == 400, "a view keeps its whole storage"
        del view
        assert registry.live_bytes == 0


def test_peak_per_phase_includes_the_level_at_entry():
    with StorageRegistry() as registry:
        a = torch.zeros(100)
        registry.enter("one")
        b = torch.zeros(50)
        del a
        registry.enter("two")
        del b
        registry.enter("three")
    assert registry.peaks == {"idle": 400, "one": 600, "two": 200, "three": 0}


def test_coming_back_to_a_phase_keeps_the_larger_peak():
    with StorageRegistry() as registry:
        registry.enter("one")
        a = torch.zeros(100)
        del a
        registry.enter("two")
        registry.enter("one")
        torch.zeros(10)
    assert registry.peaks["one"] == 400


def test_storages_in_the_graph_are_seen_and_die_with_it():
    with StorageRegistry() as registry:
        x = torch.zeros(100, requires_grad=True)
        y = (x * 2).sin().sum()
        assert registry.live_bytes == 400 + 400 + 4, "sin saves its input"
        y.backward()
        assert registry.live_bytes == 400 + 400 + 4, "the saved input is gone, x.grad has come"
        assert {r.nbytes for r in registry.storages()} == {400, 4}


def test_older_tensors_count_from_first_sight_or_adoption():
    old, older = torch.zeros(100), torch.zeros(7)
    with StorageRegistry() as registry:
        assert registry.live_bytes == 0
        old.neg_()
        assert registry.live_bytes == 400
        registry.adopt(older)
        registry.adopt(older)
        assert registry.live_bytes == 428
        assert [r.op for r in registry.storages()] == ["aten.neg_.default", "adopt"]


def test_a_resized_storage_is_read_again():
    with StorageRegistry() as registry:
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)
        assert sum(r.nbytes for r in registry.storages()) == 0 == registry.live_bytes
        a.untyped_storage().resize_(40)
        a[:5] + 1  # the op sees the new size by itself
        assert registry.live_bytes == 40


def test_meta_tensors_count_with_the_size_they_would_have():
    with StorageRegistry() as registry:
        a = torch.zeros(10, 10, device="meta", dtype=torch.bfloat16)
        assert registry.live_bytes == 200
        assert [r.device.type for r in registry.storages()] == ["meta"]
        del a
        assert registry.live_bytes == 0


def test_tensors_outlive_the_registry():
    with StorageRegistry() as registry:
        a = torch.zeros(10)
    del registry
    gc.collect()
    del a


def test_events_list_new_bytes_per_op():
    with StorageRegistry(record_events=True) as registry:
        a = torch.zeros(10)
        a.view(5, 2)
    assert registry.events == [("idle", "aten.zeros.default", 40, 40), ("idle", "aten.view.default", 0, 40)]
