"""ThreadSanitizer over the kernels: none of them has a race, and it sees each barrier that is taken away."""

import re
import unittest

import kernels

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# One and several slabs of columns, one and two buffers, hidden NaN (which makes the careful loop run), options, dbias,
# few queries with cut keys.
CLEAN = (r"^f16\.b1h2k1\.q70k33\.d32\.causal$", r"^bf16\.b1h2k1\.q19k21\.d(256|512)\.causal$",
         r"^f32\.b1h8k1\.q40k50\.d128$", r"^f32\.b2h4k2\.q70k83\.d40\.causal")
FILES = {"forward.metal": CLEAN[0], "dq.metal": CLEAN[0], "dkdv.metal": CLEAN[0]}


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


@unittest.skipUnless(kernels.TSAN, "there is no library of ThreadSanitizer")
class Races(unittest.TestCase):
    def test_none(self):
        for cases in CLEAN:
            code, said, _ = kernels.check(cases, races=True, route="fused")
            self.assertNotIn("data race", said)
            self.assertEqual(code, 0, said)
        code, said, _ = kernels.check(r"^f16\.b1h4k4\.q1k70\.d40\.causal$", races=True, route="vector")
        self.assertEqual(code, 0, said)

    def test_each_barrier_of_the_loop(self):
        """Those of a plain tile: after what is loaded, and before it is replaced; the first and last unless ALL."""
        for name, cases in FILES.items():
            lines = (kernels.ROOT / "src/metal/kernels" / name).read_text().splitlines()
            attend = next(n for n, line in enumerate(lines) if line.startswith("FB_FN void attend("))
            end = next(n for n in range(attend, len(lines)) if lines[n] == "}")
            plain, skipped, found = [], 0, 0
            for n in range(attend, end):
                word = lines[n].strip()
                if word.startswith(("#if FB_BUFFERS == 1", "#if FB_WN > 1", "#if FB_KEEP_DS", "if (careful) {")):
                    skipped += 1
                elif skipped and (word.startswith(("#else", "#endif")) or word == "}"):
                    skipped -= 1
                elif not skipped and word == BARRIER:
                    plain.append(n)
            self.assertGreaterEqual(len(plain), 4, name)
            for n in plain if kernels.ALL else (plain[0], plain[-1]):
                whole = "\n".join(lines) + "\n"
                fewer = "\n".join(lines[:n] + [""] + lines[n + 1:]) + "\n"
                with kernels.edited(name, whole, fewer) as folder:
                    _, said, _ = kernels.check(cases, kernels=folder, races=True)
                    self.assertIn("data race", said, f"{name}:{n + 1}")
                    self.assertRegex(said, r"\w+\.(metal|msl):\d+")
                    found += 1
            self.assertEqual(found, len(plain) if kernels.ALL else 2)


if __name__ == "__main__":
    unittest.main()
