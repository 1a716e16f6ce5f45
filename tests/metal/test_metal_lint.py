"""Address spaces: Metal has no pointer or reference without one. clang checks the kernels' text as C++ for OpenCL, whose
spaces are the same four; see lint/metal_stdlib."""

import re
import subprocess
import tempfile
import unittest

import kernels

SIZES = {"KEEP_DS": 0, "D": 128, "DV": 128, "BM": 16, "BN": 16, "WM": 2, "MI": 1, "THREADS": 128}
# Every branch of the texts: types, options, stacked heads, slabs of columns, buffers.
SPECS = [dict(SIZES, TYPE=0, OPTIONS=0, STACK=0, WN=1, BUFFERS=1), dict(SIZES, TYPE=1, OPTIONS=15, STACK=0, WN=2, BUFFERS=2),
         dict(SIZES, TYPE=2, OPTIONS=15, STACK=1, WN=1, BUFFERS=2), dict(SIZES, TYPE=1, OPTIONS=4, STACK=0, WN=2, BUFFERS=1, KEEP_DS=1)]
SPACES = "device|constant|threadgroup|thread"


def complaints(name, spec, folder=kernels.ROOT / "src/metal/kernels"):
    with tempfile.NamedTemporaryFile("w", suffix=".cl") as file:
        file.write(kernels.flat(name, spec, folder))
        file.flush()
        command = [kernels.CLANG, "-x", "cl", "-cl-std=clc++2021", "-target", "spir64", "-fsyntax-only", "-cl-no-stdinc",
                   "-w", "-isystem", str(kernels.ROOT / "tests/metal/lint"), file.name]
        return subprocess.run(command, capture_output=True, text=True).stderr


def spaceless(name, text):
    """Declarations of pointers and references that name no space: of parameters, locals and members."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)
    types = r"element|operand|sums|float|int|uint|uchar|work|rows|extras|inputs|state|turn|place|fb__metal_\w+|T"
    found = []
    for m in re.finditer(rf"[^(),;{{}}<>]*\b(?:{types})\s*[*&]\s*\w+", code):
        if not re.search(rf"\b({SPACES})\b", m[0]):
            found.append(f"{name}:{code.count(chr(10), 0, m.end()) + 1}: {m[0].strip()}")
    return found


class Lint(unittest.TestCase):
    def test_spaces_agree(self):
        for name in kernels.KERNELS:
            for spec in SPECS:
                self.assertEqual(complaints(name, spec), "", f"{name} {spec}")

    def test_every_pointer_names_a_space(self):
        texts = sorted((kernels.ROOT / "src/metal/kernels").glob("*.m*"))
        self.assertGreaterEqual(len(texts), 10)
        self.assertEqual([s for t in texts for s in spaceless(t.name, t.read_text())], [])

    def planted(self, name, old, new, expected):
        with kernels.edited(name, old, new) as folder:
            found = complaints(name if name in kernels.KERNELS else "forward.metal", SPECS[1], folder)
            self.assertRegex(found, expected)

    def test_wrong_space_is_found(self):
        self.planted("forward.metal", "threadgroup element *K = t.memory, *V", "device element *K = t.memory, *V",
                     r"forward\.metal:\d+:\d+: error: .*'__global")

    def test_wrong_argument_is_found(self):
        self.planted("tile.msl", "*(threadgroup uint4 *)to = *(const device uint4 *)from;",
                     "*(threadgroup uint4 *)to = *(const device uint4 *)to;", r"tile\.msl:\d+:.*error")

    def test_write_to_constant_is_found(self):
        self.planted("problem.msl", "    w.b = b;\n", "    w.b = b, a.batch = b;\n", r"problem\.msl:\d+:.*error")

    def test_missing_space_is_found(self):
        path = kernels.ROOT / "src/metal/kernels/tile.msl"
        text = path.read_text()
        for old, new in (("threadgroup element *tile, const", "element *tile, const"),
                         ("const thread rows &t", "const rows &t")):
            self.assertIn(old, text)
            self.assertEqual(len(spaceless("tile.msl", text.replace(old, new, 1))), 1, new)


if __name__ == "__main__":
    unittest.main()
