"""Both passes on the model of a GPU of tests/model, which runs the CUDA kernels on this machine's processor: what Python
writes into a descriptor and into fb_io for a GPU is right. Its memory is the host's, so NumPy's arrays lie "there".

The libraries of the model are built with the C tests; without them this is skipped.
"""

import os
import pathlib
import subprocess
import sys

import conftest
import flashback_attention as fa
import pytest

CODE = """
import numpy as np
import flashback_attention as fa
from flashback_attention import _arrays, _engine, _plan

rng = np.random.default_rng()
make = lambda *shape: rng.standard_normal(shape).astype(np.float32)
there = lambda x: _arrays.view(x, "operand")._replace(device=(2, 0))


def both(q, k, v, dout, operands, numbers, **options):
    out, lse = fa.attention(q, k, v, return_lse=True, **options)
    want = out, lse, *fa.attention_vjp(dout, q, k, v, out, lse, **options)
    on_gpu = [None if x is None else there(x) for x in (q, k, v, *operands)]
    assert "device: cuda 0" in _engine.explain(_arrays.arrays, on_gpu, numbers)
    out, lse = (x._replace(device=(2, 0)) for x in _engine.forward(_arrays.arrays, on_gpu, numbers))
    wanted = True, True, True, operands[0] is not None, operands[3] is not None
    got = out, lse, *_engine.backward(_arrays.arrays, there(dout), None, on_gpu, out, lse, numbers, wanted)
    for x, y in zip(got, want):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_allclose(x.owner, y, rtol=1e-4, atol=1e-5)


q, k, v, dout = make(2, 4, 9, 16), make(2, 2, 12, 16), make(2, 12, 2, 16).transpose(0, 2, 1, 3), make(2, 4, 9, 16)
bias, sinks, mask = make(1, 4, 1, 12), make(4), rng.random((2, 1, 9, 12)) < 0.8
both(q, k, v, dout, (bias, mask, None, sinks, *[None] * 4), _plan.Options(right=0, softcap=2.0),
     bias=bias, mask=mask, sinks=sinks, causal=True, softcap=2.0)
cu = np.array([0, 3, 9], np.int32)
flat = [np.ascontiguousarray(x[0].transpose(1, 0, 2))[:9] for x in (q, k, v, dout)]
both(*flat, (*[None] * 4, cu, cu, None, None), _plan.Options(left=2, right=0, len_q=6, len_k=6),
     window=(2, 0), cu_seqlens_q=cu, cu_seqlens_k=cu)
print("both passes agree")
"""


def test_both_passes(tmp_path):
    conftest.need("numpy", "this test")
    places = pathlib.Path(fa.get_library()).parent / "tests/mock", conftest.ROOT / "build/ci/tests/mock"
    mocks = next((p for p in places if (p / "model_nvrtc").is_dir()), None)
    if mocks is None:
        pytest.skip("this test needs the model of a GPU, which the C tests build (make test, or the preset ci)")
    environment = dict(
        os.environ,
        LD_LIBRARY_PATH=f"{mocks}/model_driver:{mocks}/model_cublas",
        FLASHBACK_NVRTC=f"{mocks}/model_nvrtc/libnvrtc.so.13",
        FLASHBACK_CACHE=str(tmp_path),
        PYTHONPATH=str(conftest.ROOT / "bindings/python"),
    )
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == "both passes agree\n", done.stderr
