"""The library in float64 against the independent oracle, element by element: the golden cases and random problems."""

import math
import random
import unittest

import flashback_ctypes as flashback
import oracle_f64 as oracle

ROUTES = ("reference", "fused", "unfused", "vector")
VECTOR_QUERIES = 8  # what route "vector" takes at most
TOLERANCE = 1e-12
RANDOM_PROBLEMS = 60


def worst_difference(found, expected):
    """Largest difference relative to the tensor's largest number, but at least to 1; infinite where exactly one side
    is NaN or infinite."""
    if len(found) != len(expected):
        return math.inf
    size = max([1.0] + [abs(x) for x in expected if math.isfinite(x)])
    worst = 0.0
    for x, y in zip(found, expected):
        if x == y or (math.isnan(x) and math.isnan(y)):
            continue
        worst = max(worst, abs(x - y) / size if math.isfinite(x) and math.isfinite(y) else math.inf)
    return worst


def some(rng, chance=0.35):
    return rng.random() < chance


def length(rng, longest):
    """Of a sequence in a batch: mostly something, at times nothing or all."""
    return longest if some(rng, 0.3) else 0 if some(rng, 0.1) else rng.randint(0, longest)


def repeating(rng, *sizes):
    return tuple(1 if some(rng) else size for size in sizes)


def random_problem(rng):
    """Mostly small; about one in seven is long enough for several tiles, and keeps to few heads."""
    many = some(rng, 0.15)
    p = oracle.Problem(batch=1 if many else rng.randint(1, 3), heads_kv=1 if many else rng.randint(1, 2))
    p.heads_q = p.heads_kv * rng.randint(1, 2 if many else 3)
    p.head_dim, p.head_dim_v = rng.randint(1, 9), rng.randint(1, 9)
    longest = (rng.choice((8, 150)), 300) if many else (rng.choice((12, 40)),) * 2
    p.len_q, p.len_k = (0 if some(rng, 0.03) else rng.randint(2, most) for most in longest)
    p.left = rng.randint(0, 2 + p.len_k // 2) if some(rng) else None
    p.right = rng.choice((0, 0, 2, 9)) if some(rng) else None
    p.top_left = some(rng)
    p.position_offset = rng.randint(-3, 3) if some(rng) else 0
    p.scale = rng.uniform(-1, 1) if some(rng) else None
    p.softcap = rng.choice((0.5, 2.0, 30.0)) if some(rng) else 0.0
    p.sinks, p.dlse = some(rng), some(rng)
    if some(rng):
        p.cu_q, p.cu_k = [0], [0]
        for _ in range(p.batch):
            p.cu_q.append(p.cu_q[-1] + length(rng, p.len_q))
            p.cu_k.append(p.cu_k[-1] + length(rng, p.len_k))
    elif some(rng):
        p.lens_q = [length(rng, p.len_q) for _ in range(p.batch)]
        p.lens_k = [length(rng, p.len_k) for _ in range(p.batch)]
    if some(rng):
        p.bias = repeating(rng, p.batch, p.heads_q, p.len_q, p.len_k)
    if some(rng):
        p.mask = repeating(rng, p.batch, p.heads_q, p.len_q, p.len_k)
    if some(rng):
        p.block = (16, 16) + repeating(rng, p.batch, p.heads_q)
    oracle.fill(p)
    if p.bias and some(rng):
        p.tensors["bias"] = [-math.inf if x > 0.8 else x for x in p.tensors["bias"]]
    return p


def random_layouts(rng, packed):
    layouts = {}
    for name in flashback.SIDES:
        dims = ["head", "row"]
        rng.shuffle(dims)
        if not packed:
            dims.insert(rng.randint(0, 2), "batch")
        layouts[name] = (dims, rng.randint(0, 3))
    return layouts


class Oracle(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lib = flashback.load()

    def compare(self, name, p, expected, **how):
        for route in ROUTES[: 4 if p.len_q <= VECTOR_QUERIES else 3]:
            with self.subTest(name, route=route):
                found = flashback.attention(self.lib, p, route, **how)
                differences = {tensor: worst_difference(found[tensor], expected[tensor]) for tensor in found}
                worst = max(differences, key=differences.get)
                print(f"{name:44s} {route:10s} {differences[worst]:.1e} ({worst})")
                self.assertLessEqual(differences[worst], TOLERANCE, worst)

    def test_golden(self):
        for name, options in oracle.GOLDEN.items():
            p = oracle.fill(oracle.Problem(**options))
            self.compare(name, p, oracle.attention(p))

    def test_random(self):
        rng, with_gradients = random.Random(20), 0
        for number in range(RANDOM_PROBLEMS):
            p = random_problem(rng)
            expected, old = oracle.attention(p), None
            with_gradients += any(expected["dq"]) and any(expected["dv"])
            how = dict(layouts=random_layouts(rng, p.packed) if some(rng) else {}, flags=[])
            how["flags"] += [flag for flag in ("NO_DQ", "NO_DK", "NO_DV") if some(rng, 0.1)]
            if some(rng, 0.2):
                gradients = ("dq", "dk", "dv", "dbias", "dsinks")
                old = {name: oracle.vals(11, len(expected[name])) for name in gradients}
                for name in gradients:
                    expected[name] = [x + y for x, y in zip(expected[name], old[name])]
                how["flags"].append("ACCUMULATE")
            self.compare(f"random {number} {summary(p)}", p, expected, old=old, **how)
        self.assertGreater(with_gradients, RANDOM_PROBLEMS * 2 // 3, "too many problems in which nothing counts")


def summary(p):
    options = ("left", "right", "softcap", "bias", "mask", "block", "sinks", "dlse", "lens_q", "cu_q")
    used = [name for name in options if getattr(p, name) not in (None, False, 0.0) or name == "right" and p.right == 0]
    return f"{p.len_q}x{p.len_k} " + ",".join(used)


if __name__ == "__main__":
    unittest.main()
