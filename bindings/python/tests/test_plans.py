"""Plans: found again, bounded, used by threads at once, and the child of a fork; the workspace; what a call costs."""

import os
import statistics
import threading
import time

import pytest

np = pytest.importorskip("numpy", reason="needs the package numpy")
import flashback_attention as fa  # noqa: E402
from flashback_attention import _engine, _plan  # noqa: E402


def operands(rng, length=9, heads=2):
    return [rng.standard_normal((1, heads, length, 16)).astype(np.float32) for _ in range(3)]


def test_found_again(rng):
    fa.clear_plans()
    q, k, v = operands(rng)
    for _ in range(3):
        fa.attention(q, k, v, causal=True)
    assert len(_plan.cache) == 1
    fa.attention(q, k, v)
    fa.attention(q, k, v, scale=0.5)
    fa.attention(q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), k, v)
    assert len(_plan.cache) == 4


def test_bounded(rng):
    """The plans used last stay, and those that go are released."""
    cache = _plan.Cache(capacity=3)
    made = []
    for key in "abcada":
        cache.find(key, lambda: made.append(key) or object())
    assert made == list("abcd") and list(cache.plans) == ["c", "d", "a"]
    whole = _plan.cache.capacity
    try:
        _plan.cache.capacity = 8
        for length in range(1, 40):
            fa.attention(*operands(rng, length))
        assert len(_plan.cache) <= 8
    finally:
        _plan.cache.capacity = whole


def test_threads(rng):
    """Threads with shapes and options of their own, on a cache that keeps dropping plans: the bits of serial runs."""
    problems = [(operands(rng, 1 + 7 * n, heads=1 + n % 3), {"causal": n % 2 == 0}) for n in range(12)]
    want = [fa.attention(*x, **o) for x, o in problems]
    wrong, whole = [], _plan.cache.capacity

    def work(seed):
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(12), 8))
        for n in order:
            if not np.array_equal(fa.attention(*problems[n][0], **problems[n][1]), want[n]):
                wrong.append(n)

    try:
        _plan.cache.capacity = 4
        fa.clear_plans()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        _plan.cache.capacity = whole
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork(rng):
    """A child computes, also when a thread of the parent held the cache's lock."""
    q, k, v = operands(rng)
    want = fa.attention(q, k, v)
    with _plan.cache.lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(fa.attention(q, k, v), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_workspace_is_kept_and_bounded():
    """A thread's workspace is used again; larger ones than the bound are not kept."""
    memory, address = _engine.cpu_workspace(1000)
    assert address and _engine.cpu_workspace(10) == (memory, address)
    scratch = _engine._Scratch()
    scratch.KEPT = 4096
    kept = scratch.get(4096)
    assert scratch.get(5000) is not kept and scratch.get(100) is kept


def test_info_and_explain(rng):
    assert f"version: {fa.__version__}" in fa.info() and "backend: cpu" in fa.info()
    words = fa.explain(*operands(rng), causal=True, softcap=2.0)
    assert "causal" in words and "softcap 2" in words and "route: fused" in words and "workspace:" in words


def test_results_and_workspaces_are_poisoned(rng):
    """The fixture of conftest.py does what it says, for every test here."""
    import ctypes

    from flashback_attention import _arrays

    place = _plan.Place((2, 3), (3, 1), _plan.CODES["f32"])
    assert np.isnan(_arrays.arrays.empty(place, _arrays.view(operands(rng)[0], "q")).owner).all()
    _, address = _engine.cpu_workspace(100)
    assert ctypes.string_at(address, 100) == b"\xff" * 100


@pytest.mark.unpoisoned
def test_cost_of_a_call(rng):
    """Prints what Python adds to a call of the library (run with -s); no bound, as other programs run here too."""
    kinds = {"NumPy": operands(rng, 1)}
    try:
        import torch

        kinds["PyTorch"] = [torch.tensor(x) for x in kinds["NumPy"]]
        kinds["PyTorch with gradients"] = [torch.tensor(x, requires_grad=True) for x in kinds["NumPy"]]
    except ImportError:
        pass
    for name, (q, k, v) in kinds.items():
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            fa.attention(q, k, v)
            times.append(time.perf_counter() - start)
        kernel = _library_alone(kinds["NumPy"])
        print(f"{name}: {statistics.median(times) * 1e6:.1f} us a call, {kernel * 1e6:.1f} us of it in the library")
        assert statistics.median(times) > kernel > 0


def _library_alone(arrays):
    """Median seconds of fb_forward itself on the same problem."""
    from flashback_attention import _arrays

    views = [_arrays.view(x, "x") for x in arrays]
    padded, options = (*views, *[None] * 8), _plan.Options()
    plan = _plan.Plan(_plan.describe(dict(zip(_plan.OPERANDS, padded)), options), ())
    words, keep = _engine._io(_arrays.arrays, plan, padded)
    out = np.empty_like(arrays[0])
    words[_engine._SLOT["out"]] = out.__array_interface__["data"][0]
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        _engine.lib.fb_forward(plan.handle, words)
        times.append(time.perf_counter() - start)
    assert np.isfinite(out).all()
    return statistics.median(times)
