"""What a pass costs, counted by the emulator: products of 8 x 8, bytes from and to memory, barriers. These bounds are
the kernels' promises; ml-explore/mlx#3241 is what they are compared with."""

import unittest

import kernels

# f16 tiles of the tables, BM x BN, for head dims up to 64 and 128: forward, dq (from M3 on), dkdv.
TILES = {64: {"fb_forward": (32, 32), "fb_dq": (32, 32), "fb_dkdv": (32, 32)},
         128: {"fb_forward": (32, 16), "fb_dq": (32, None), "fb_dkdv": (16, 16)}}
PRODUCTS = {"fb_forward": 2, "fb_dq": 3, "fb_dkdv": 4}
Q, K, V, DOUT = 1, 2, 3, 6


def up(x, to):
    return (x + to - 1) // to


class Counts(unittest.TestCase):
    def dispatches(self, cases):
        code, said, rows = kernels.check(cases, counts=True)
        self.assertEqual(code, 0, said)
        found = {row["kernel"]: row for row in rows}
        self.assertEqual(len(found), len(rows), "a kernel ran twice")
        return found

    def test_dense(self):
        """4 heads, 128 queries, 128 keys, D 64, all cells count: nothing is multiplied or read in vain."""
        rows = self.dispatches(r"^f16\.b1h4k4\.q128k128\.d64\.qkv$")
        heads, length, d = 4, 128, 64
        for name, products in PRODUCTS.items():
            self.assertEqual(rows[name]["products"], products * heads * (length // 8) ** 2 * d // 8, name)
        tensor = heads * length * d * 2
        loads = {name: rows[name]["loads"] for name in rows}
        for name in ("fb_forward", "fb_dq"):  # q, k and v are one buffer: keys pass by for each tile of 32 queries
            self.assertEqual(sum(loads[name][Q:V + 1]), tensor * (1 + 4 + 4), name)
        self.assertEqual(sum(loads["fb_dkdv"][Q:V + 1]), tensor * (4 + 1 + 1))
        self.assertEqual((loads["fb_dq"][DOUT], loads["fb_dkdv"][DOUT]), (tensor, tensor * 4))
        stores = {name: sum(rows[name]["stores"]) for name in rows}
        self.assertEqual(stores["fb_forward"], tensor + heads * length * 4)
        self.assertEqual((stores["fb_dq"], stores["fb_dkdv"]), (tensor, 2 * tensor))

    def test_groups(self):
        """8 heads share their keys, 40 queries, 50 keys, D 128: K and V once for all of them."""
        rows = self.dispatches(r"^f16\.b1h8k1\.q40k50\.d128$")
        heads, len_q, len_k, d = 8, 40, 50, 128
        for name, (bm, bn) in TILES[128].items():
            bn = bn or (32 if rows[name]["threadgroup_bytes"] > 16384 else 16)
            own, other = (len_k, len_q) if name == "fb_dkdv" else (len_q, len_k)
            tiles = heads * up(own, bm) * up(other, bn)
            self.assertEqual(rows[name]["products"], PRODUCTS[name] * tiles * (bm // 8) * (bn // 8) * d // 8, name)
        loads = rows["fb_dkdv"]["loads"]
        self.assertEqual((loads[K], loads[V]), (len_k * d * 2, len_k * d * 2))
        # The original: all query heads, blocks of 16 queries.
        self.assertLessEqual(loads[K], heads * up(len_q, 16) * len_k * d * 2 / 2)

    def test_barriers(self):
        """Two for a tile, and four more for what stays in registers, twice that for two tensors; three for the end."""
        rows = self.dispatches(r"^f16\.b1h4k4\.q128k128\.d64\.qkv$")
        threadgroups, tiles = 4 * 4, 4
        self.assertEqual(rows["fb_forward"]["barriers"], threadgroups * (2 + 2 * tiles + 3))
        for name in ("fb_dq", "fb_dkdv"):  # the original: 6 and 8 for a tile
            self.assertEqual(rows[name]["barriers"], threadgroups * (4 + 2 * tiles + 3), name)

    def test_causal(self):
        """Tiles beyond the diagonal cost nothing: a window makes work O(L W)."""
        rows = self.dispatches(r"^f16\.b1h4k4\.q128k128\.d64\.causal\.qkv$")
        for name, products in PRODUCTS.items():
            tiles = 4 * (1 + 2 + 3 + 4)
            self.assertEqual(rows[name]["products"], products * tiles * 4 * 4 * 8, name)


if __name__ == "__main__":
    unittest.main()
