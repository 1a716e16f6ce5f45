"""Faults planted into the kernels, each caught, and by its name; the texts as they are pass the same runs. The last one
is a defect that ml-explore/mlx#3241 has."""

import unittest

import kernels

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
CASES = r"^f16\.b1h2k1\.q70k33\.d32\.causal$"


class Faults(unittest.TestCase):
    def test_none(self):
        code, said, _ = kernels.check(CASES, checked=True)
        self.assertEqual(code, 0, said)
        self.assertIn("1 passed, 0 failed", said)

    def planted(self, name, old, new, expected, cases=CASES, **options):
        with kernels.edited(name, old, new) as folder:
            code, said, _ = kernels.check(cases, kernels=folder, **options)
            self.assertNotEqual(code, 0, f"nobody minds: {new}")
            self.assertRegex(said, expected)

    def test_barrier_removed(self):
        """Where the order of threads is good the results are right: ThreadSanitizer sees it all the same."""
        self.planted("forward.metal", "        accumulate<FB_NV, WIDE_V>(o.o, s, V + wn * FB_NV * 8);\n        " + BARRIER,
                     "        accumulate<FB_NV, WIDE_V>(o.o, s, V + wn * FB_NV * 8);\n", "data race", races=True)

    def test_barrier_that_not_all_threads_reach(self):
        self.planted("dkdv.metal", "        " + BARRIER + "\n        at.tile++;",
                     "        if (p.lane < 31)\n            " + BARRIER + "\n        at.tile++;",
                     r"fb_dkdv.*threads part ways: \d+ wait in \S+ at dkdv.metal:\d+")

    def test_wrong_tile_bound(self):
        self.planted("problem.msl", "(int)((seen.hi + FB_BN - 1) / FB_BN)", "(int)(seen.hi / FB_BN)", r"FAIL.*(out|lse)\[")

    def test_tile_bound_of_queries(self):
        self.planted("dkdv.metal", "(int)((seen.hi + FB_BN - 1) / FB_BN)", "(int)(seen.hi / FB_BN)", r"FAIL.*d[kv]\[")

    def test_missing_infinity(self):
        self.planted("forward.metal", "S = inside ? (a.scale < 0 ? -S : S) : -INFINITY;",
                     "S = inside ? (a.scale < 0 ? -S : S) : 0;", r"FAIL.*(out|lse)\[")

    def test_address_space_slip(self):
        """Compilers for one memory do not see it: test_metal_lint.py."""
        with kernels.edited("forward.metal", "threadgroup element *memory;", "device element *memory;") as folder:
            code, said, _ = kernels.check(CASES, kernels=folder)
            self.assertEqual(code, 0, said)

    def test_over_the_limit(self):
        self.planted("dkdv.metal", "stats + 2 * FB_BN,", "stats + 2 * FB_BN + 4096,", r"fb_dkdv.*reaches beyond threadgroup memory",
                     cases=r"^f16\.b1h8k1\.q40k50\.d128$")

    def test_outside_of_buffers(self):
        self.planted("tile.msl", "first + n < end ? left_columns - c : 0", "left_columns - c",
                     r"fb_\w+, threadgroup.*reads 4 bytes that are in no buffer", checked=True)

    def test_uninitialised_memory(self):
        self.planted("dkdv.metal", "        stats[FB_BN + r] = exists ? t.delta[at] : 0;\n", "", r"FAIL.*dk\[.* is -?nan")

    def test_masked_cells_of_a_causal_offset(self):
        """The original masks the last ceil(BM / BN) tiles only."""
        old = "const bool covered = covers(whole, k0, FB_BN);"
        new = "const bool covered = (tile + 1) * FB_BN <= len_k && tile < tiles.y - (FB_BM + FB_BN - 1) / FB_BN;"
        good, bad = r"^bf16\.b1h2k1\.q64k64\.d16\.causal$", r"^bf16\.b1h2k1\.q63k64\.d16\.causal$"
        for cases in (good, bad):
            self.assertEqual(kernels.check(cases)[0], 0)
        self.planted("dq.metal", old, new, r"FAIL.*dq\[", cases=bad)
        with kernels.edited("dq.metal", old, new) as folder:
            self.assertEqual(kernels.check(good, kernels=folder)[0], 0, "without an offset the original is right")


if __name__ == "__main__":
    unittest.main()
