"""bench/peers/gpu.py without a GPU: its problems and targets, its tables, and what it says where PyTorch or the GPU is
missing."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest

PEERS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"
sys.path.insert(0, str(PEERS))
import gpu
import gpu_cases


def case(group="hopper", length=16384, dim=128, heads=16, heads_kv=None, causal=False):
    return gpu_cases.Case(group, "bf16", 16384 // length, heads, heads_kv or heads, length, dim, causal)


class Cases(unittest.TestCase):
    def test_sets(self):
        hopper, original = gpu_cases.cases("hopper"), gpu_cases.cases("original")
        self.assertEqual((len(hopper), len(original)), (38, 25))
        self.assertEqual(gpu_cases.cases("all"), original + hopper)
        self.assertEqual(len({c.name("fwd") for c in original + hopper}), 63)
        self.assertEqual({c.batch * c.length for c in hopper}, {16384})
        self.assertEqual({(c.batch, c.dtype, c.heads) for c in original}, {(1, "f16", 32)})
        dense = [c.flops("fwd") for c in hopper if not c.causal and c.length == 512]
        self.assertEqual(len(set(dense)), 1, "as many operations for every head dimension")

    def test_cost(self):
        self.assertEqual(case(length=512).flops("fwd"), 4 * 32 * 16 * 512 * 512 * 128)
        self.assertEqual(case(causal=True).flops("bwd"), case().flops("fwd") * 2.5 / 2)
        self.assertEqual(case().flops("both"), case().flops("fwd") + case().flops("bwd"))
        self.assertEqual(case(causal=True).name("bwd"), "bf16.b1h16k16.l16384.d128.causal.bwd")

    def test_targets(self):
        for asked, direction, want in (
            ({"group": "original"}, "both", (1, 1.2)),
            ({"group": "original"}, "fwd", None),
            ({"length": 512}, "both", (1.2, 1.5)),
            ({"length": 1024}, "bwd", None),
            ({"length": 2048}, "fwd", (0.97, 1)),
            ({"length": 2048}, "bwd", None),
            ({"length": 4096}, "bwd", (1, 1.1)),
            ({"length": 4096}, "both", None),
        ):
            self.assertEqual(gpu_cases.ratio(case(**asked), direction), want, (asked, direction))
        self.assertEqual(gpu_cases.rate(case(causal=True), "bwd"), (570, 680))
        self.assertEqual(gpu_cases.rate(case(dim=64, heads=32), "fwd"), (None, 620))
        self.assertEqual(gpu_cases.rate(case(length=8192, heads=32, heads_kv=8, causal=True), "bwd"), (560, 650))
        for asked in ({"length": 8192}, {"group": "original"}, {"causal": True}):
            self.assertIsNone(gpu_cases.rate(case(**asked), "fwd"), asked)

    def test_verdicts(self):
        far, near = case(), case(length=2048)
        self.assertEqual(gpu_cases.verdict(far, "bwd", 1.2, 700, True), "stretch")
        self.assertEqual(gpu_cases.verdict(far, "bwd", 1.2, 650, True), "must")
        self.assertEqual(gpu_cases.verdict(far, "bwd", 1.2, 600, True), "no")
        self.assertEqual(gpu_cases.verdict(far, "bwd", 1.2, 600, False), "stretch", "rates are an H200's")
        self.assertEqual(gpu_cases.verdict(far, "bwd", 0.9, 700, True), "no")
        self.assertEqual(gpu_cases.verdict(near, "fwd", 0.98, 1, True), "must")
        self.assertEqual(gpu_cases.verdict(near, "bwd", 0.1, 1, True), "-")


class Tables(unittest.TestCase):
    """The tables and rows of numbers made up here."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name, "rows.jsonl")
        self.rows = gpu.Rows(self.path, {"machine": "NVIDIA H200"})
        self.options = types.SimpleNamespace(peers=["fa2", "cudnn", "unfused"])
        common = {"runs": 9, "differs": 0.01}
        self.found = {
            "fa2": {"fwd": (2.0, 3.0), "bwd": (4.0, 9.0), "both": (6.0, 12.0), "bytes": 3e6, **common},
            "cudnn": {"fwd": (2.2, 2.1), "bwd": (4.0, 8.0), "both": (6.2, 10.1), "bytes": 4e6, **common},
            "unfused": {"error": "no room"},
        }

    def tearDown(self):
        if self.rows.file:
            self.rows.file.close()
        self.folder.cleanup()

    def printed(self, function, *arguments):
        words = io.StringIO()
        with contextlib.redirect_stdout(words):
            result = function(*arguments)
        return result, words.getvalue()

    def written(self):
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def test_speed(self):
        met, words = self.printed(gpu.print_speed, self.rows, self.options, case(length=4096), "fwd", self.found)
        self.assertEqual(met, "no")
        self.assertIn("| 2.2000 |", words, "our time is the one beside the best peer")
        self.assertIn("| 1.50 | 0.95 | - | cudnn | 0.95 | 0.97 | no |", words)
        speed, best = self.written()[:2], self.written()[2]
        self.assertEqual([row["peer"] for row in speed], ["fa2", "cudnn"])
        self.assertEqual((best["kind"], best["peer"], best["met"]), ("best", "cudnn", "no"))
        self.assertEqual(best["machine"], "NVIDIA H200")

    def test_nothing_ran(self):
        errors = {name: {"error": "broken"} for name in self.options.peers}
        met, words = self.printed(gpu.print_speed, self.rows, self.options, case(), "fwd", errors)
        self.assertEqual((met, words.count("|")), ("-", 14), words)

    def test_original(self):
        lines = [(case("original", 2048), self.found, 2e6)]
        _, words = self.printed(gpu.print_original, self.rows, lines)
        self.assertIn("| 10.100 (cudnn) | 6.200 | - | 1.63x | - | 3.0 | 2.0 |", words)
        row = self.written()[-1]
        self.assertEqual((row["bytes"], row["fa2_bytes"], row["unfused_bytes"]), (2e6, 3e6, None))

    def test_troubles(self):
        self.found["cudnn"]["differs"] = float("nan")
        wrong, words = self.printed(gpu.print_troubles, self.rows, case(), self.found)
        self.assertEqual(wrong, ["no"])
        self.assertIn("WRONG", words)
        self.assertIn("unfused: no room", words)
        self.assertEqual([row["kind"] for row in self.written()], ["differs", "refused"])


class Program(unittest.TestCase):
    """What is missing is said in a sentence, not in a traceback."""

    def run_program(self, *arguments, modules=None):
        environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", CUDA_VISIBLE_DEVICES="-1")
        if modules:
            environment["PYTHONPATH"] = str(modules)
        return subprocess.run([sys.executable, PEERS / "gpu.py", *arguments], capture_output=True, text=True,
                              env=environment)  # fmt: skip

    def test_no_torch(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "torch.py").write_text("raise ImportError('not here')\n")
            done = self.run_program("--lib", os.environ["FLASHBACK_LIB"], modules=folder)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("no PyTorch (not here)", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_no_gpu(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "torch.py").write_text(
                "import types\n__version__ = '2.11'\ncuda = types.SimpleNamespace(is_available=lambda: False)\n"
            )
            done = self.run_program("--lib", os.environ["FLASHBACK_LIB"], modules=folder)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("PyTorch 2.11 sees no CUDA device 0", done.stderr)

    def test_usage(self):
        for arguments, words in ((("--lib", "/nowhere/lib.so"), "--lib: there is no"),
                                 (("--peers", "jax"), "--peers: 'jax' is not one of"),
                                 (("--set", "small"), "--set")):  # fmt: skip
            done = self.run_program(*arguments)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)

    def test_sides_compile(self):
        source = (PEERS / "gpu_sides.py").read_text(encoding="utf-8")
        compile(source, "gpu_sides.py", "exec")


if __name__ == "__main__":
    unittest.main()
