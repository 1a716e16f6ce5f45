"""bench/peers without PyTorch: which targets hold where, and what a case costs."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"))
import targets

AMX = frozenset("avx512_bf16 amx_bf16 amx_tile".split())


def case(dtype="f32", length=2048, batch=1, causal=False):
    return targets.Case(dtype, 64, length, 8, batch, causal)


class Peers(unittest.TestCase):
    def test_instructions(self):
        self.assertEqual(targets.matrix_class(AMX, ""), "amx")
        self.assertEqual(targets.matrix_class(AMX, "amx"), "amx")
        self.assertEqual(targets.matrix_class(AMX, "avx512bf16"), "avx512bf16")
        self.assertEqual(targets.matrix_class(AMX, "avx512"), "none")
        self.assertEqual(targets.matrix_class(AMX - {"amx_bf16"}, ""), "avx512bf16")
        self.assertEqual(targets.matrix_class(frozenset(), ""), "none")
        self.assertFalse(targets.has_f16_matrices(AMX, ""))
        self.assertTrue(targets.has_f16_matrices(AMX | {"amx_fp16"}, ""))
        self.assertFalse(targets.has_f16_matrices(AMX | {"amx_fp16"}, "avx512bf16"))

    def test_speed(self):
        for args, backward, matrices, want in (
            ({}, False, "amx", (1.1, 1.9)),
            ({"length": 512, "batch": 4}, False, "amx", None),
            ({"length": 512, "batch": 4, "causal": True}, False, "amx", (1.9, 3)),
            ({"causal": True}, False, "none", (1.5, 2.3)),
            ({}, True, "amx", (2, 3.5)),
            ({"length": 512, "batch": 4}, True, "amx", (1.1, 1.8)),
            ({"length": 512, "batch": 4, "causal": True}, True, "amx", (2, 3.5)),
            ({"dtype": "bf16"}, False, "amx", (2, 5)),
            ({"dtype": "bf16", "causal": True}, False, "amx", (2.5, 5)),
            ({"dtype": "bf16"}, True, "amx", (8, 20)),
            ({"dtype": "bf16", "batch": 4}, True, "amx", (5, 10)),
            ({"dtype": "bf16"}, False, "avx512bf16", (1.5, 2.5)),
            ({"dtype": "bf16"}, True, "avx512bf16", (2.5, 5)),
            ({"dtype": "bf16"}, True, "none", None),
            ({"dtype": "f16"}, True, "amx", (2, 4)),
        ):
            self.assertEqual(targets.speed(case(**args), backward, matrices), want, (args, backward, matrices))
        self.assertIsNone(targets.speed(case("f16"), True, "amx", f16_matrices=True))

    def test_accuracy(self):
        self.assertEqual(targets.accuracy(case("bf16"), "dq"), (0.5, 0.25))
        for args, tensor in ((("bf16",), "out"), (("bf16", 512), "dq"), (("f32",), "dq")):
            self.assertIsNone(targets.accuracy(case(*args), tensor))

    def test_verdicts(self):
        self.assertEqual([targets.verdict(x, (2, 4)) for x in (1.9, 2, 4)], ["no", "must", "stretch"])
        found = [targets.verdict(x, (0.5, 0.25), at_most=True) for x in (0.6, 0.5, 0.25, float("nan"))]
        self.assertEqual(found, ["no", "must", "stretch", "no"])
        self.assertEqual(targets.verdict(3, None), "-")

    def test_cost(self):
        dense, causal = case(length=8), case(length=8, causal=True)
        self.assertEqual(dense.flops(False), 4 * 1 * 8 * 8 * 8 * 64)
        self.assertEqual(causal.flops(True), dense.flops(False) * 2.5 / 2)
        self.assertEqual(causal.name(True), "f32.b1h8.l8.d64.causal.bwd")


if __name__ == "__main__":
    unittest.main()
