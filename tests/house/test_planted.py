"""A check that can't fail proves nothing: errors planted in a copy of the kernels make `flashback check` fail."""
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import house

CASES = "^f32\\.(b2h4k2\\.q6k9|b1h6k2|b2h4k2\\.q70k83)"

# What goes wrong: file, the right text, the wrong one.
PLANTED = {
    "the backward drops its mask": (
        "src/cpu/gradients.c", "fb__tile_select(c, block, tile, m, s, 0);", ";"),
    "the forward drops its mask": (
        "src/cpu/forward.c", "fb__tile_select(c, block, tile, &x->mask, x->s, -HUGE_VAL);", ";"),
    "query heads read the wrong group": (
        "src/cpu/block.c", "kv * g + (c->s->stacked ? first / len : t % g);",
        "c->s->stacked ? kv * g + first / len : t % g * c->p->d.heads_kv + kv;"),
    "delta is missing": (
        "src/cpu/isa/kernel.inc", "p * (AT(dp, r, step, j * W) - d[j])", "p * AT(dp, r, step, j * W)"),
    "the maximum is not subtracted from later tiles": (
        "src/cpu/isa/kernel.inc", "sum[j] = AT(l, 0, 0, j * W) * a;", "sum[j] = AT(l, 0, 0, j * W);"),
    "dK lacks the scale": (
        "src/cpu/backward.c", "c->s->d_pad, d->scale, rows", "c->s->d_pad, 1, rows"),
}


def run(*command):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)


def build(folder, change=None):
    """The program over the kernels that every machine has, from a copy of src with one change."""
    shutil.copytree(house.ROOT / "src", folder / "src")
    if change:
        name, right, wrong = change
        path = folder / name
        text = path.read_text()
        assert text.count(right) == 1, f"{name} has {text.count(right)} times: {right}"
        path.write_text(text.replace(right, wrong))
    flags = ["-O1", "-D_GNU_SOURCE", f"-I{house.ROOT / 'include'}", f"-I{folder / 'src'}"]
    floors = ("api", "cpu", "cuda", "metal", "jit", "core", "base")
    sources = [p for f in floors for p in sorted((folder / "src" / f).glob("*.c"))]
    sources += [folder / "src/cpu/isa" / f"{isa}.c" for isa in ("baseline", "scalar")]
    sources += [house.BUILD / "src/jit/embedded.c"]
    libs = [house.BUILD / "libflashback_cli.a", house.BUILD / "libflashback_harness.a"]
    program = folder / "flashback"
    done = run(house.CC, "-std=gnu11", *flags, house.ROOT / "cli/main.c", f"-I{house.ROOT}", *sources,
               *libs, "-ljansson", "-lpthread", "-lm", "-o", program)
    assert done.returncode == 0, done.stderr
    return program


class Planted(unittest.TestCase):
    def check(self, change):
        with tempfile.TemporaryDirectory() as folder:
            return run(build(pathlib.Path(folder), change), "check", "--threads", "1", "--filter", CASES)

    def test_nothing_planted(self):
        done = self.check(None)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr)

    def test_planted(self):
        for what, change in PLANTED.items():
            with self.subTest(what):
                done = self.check(change)
                self.assertEqual(done.returncode, 1, done.stdout[-500:] + done.stderr)
                self.assertIn("FAIL", done.stdout)


if __name__ == "__main__":
    unittest.main()
