"""Source: sizes, heads and words. Every exception stands here with its reason."""

import pathlib
import re
import unittest

import house

LINES = 500
KERNEL_LINES = 700
FUNCTION_LINES = 60
KERNEL_FUNCTION_LINES = 200
HEAD_LINES = 10
KERNEL_HEAD_LINES = 20  # with the algorithm in pseudo-code
COLUMNS = 110
KERNEL_COLUMNS = 120

LONG_FILES = {}
LONG_FUNCTIONS = {}
LONG_HEADS = {
    "src/cpu/backward.c": "the algorithm in pseudo-code",
    "src/cpu/forward.c": "the algorithm in pseudo-code",
}

# Words that mark something unfinished, and places that exist on one machine only.
UNFINISHED = re.compile(r"\b([T]ODO|[F]IXME|[X]XX|[H]ACK)\b")
PLACES = re.compile(r"(?<![\w.)}])/(?:home|root|work|mnt|Users)/\w|\blocalhost\b|\w\.(?:internal|lan)\b")

CODE = house.files(house.CODE_SUFFIXES)
KERNELS = house.files(house.KERNEL_SUFFIXES)  # of GPUs; their comments begin with //
TEXT_SUFFIXES = house.CODE_SUFFIXES | house.KERNEL_SUFFIXES | {
    ".md", ".txt", ".py", ".sh", ".cmake", ".json", ".jsonl", ".in", ".1", ""}

ATTRIBUTES = re.compile(r"__attribute__\(\(.*?\)\) *|__launch_bounds__\(.*?\) *")


def is_kernel(path):
    return path.as_posix().startswith("src/cpu/isa/") or path.suffix in house.KERNEL_SUFFIXES


def functions(path):
    """(name, first line, lines) of every function: its body opens at the end of a line that starts in column 0 or
    continues one, and closes with } in column 0."""
    start, name = None, None
    for number, line in enumerate(house.without_comments(house.text(path)).splitlines(), 1):
        if start is None and re.match(r"(?!typedef|struct|union|enum)[A-Za-z_].*\w\(", line):
            start, name = number, re.search(r"(\w+)\(", ATTRIBUTES.sub("", line))
        if start is not None and (line.startswith("}") or line.endswith(";") and not line.startswith(" ")):
            if line.startswith("}") and name:
                yield name[1], start, number - start + 1
            start = None


class Source(unittest.TestCase):
    def test_file_lengths(self):
        scripts = house.files({".py", ".sh", ".cmake"})
        lengths = {str(f): house.text(f).count("\n") for f in CODE + KERNELS + scripts}
        limit = lambda f: KERNEL_LINES if is_kernel(pathlib.Path(f)) else LINES
        long = {f: n for f, n in lengths.items() if n > limit(f)}
        self.assertEqual(long.keys() - LONG_FILES.keys(), set(), long)
        self.assertEqual(LONG_FILES.keys() - long.keys(), set(), "exceptions that are no longer needed")

    def test_function_lengths(self):
        found = [(f, *row) for f in CODE + KERNELS for row in functions(f)]
        self.assertGreater(len(found), 50, "the scan finds no functions")
        limit = lambda f: KERNEL_FUNCTION_LINES if is_kernel(f) else FUNCTION_LINES
        long = {name: f"{f}:{line}: {n} lines" for f, name, line, n in found if n > limit(f)}
        self.assertEqual(long.keys() - LONG_FUNCTIONS.keys(), set(), long)
        self.assertEqual(LONG_FUNCTIONS.keys() - long.keys(), set(), "exceptions that are no longer needed")

    def test_heads(self):
        """Every file says first what it is; in src/ it or its header also says on which floor it stands."""
        wrong = []
        for path in CODE:
            code = house.text(path)
            head = re.match(r"/\*.*?\*/", code, flags=re.S)
            if not head:
                wrong.append(f"{path}: no head comment")
                continue
            if path.parts[0] == "include":
                continue  # the headers are the manual
            if head[0].count("\n") >= HEAD_LINES and str(path) not in LONG_HEADS:
                wrong.append(f"{path}: the head comment has more than {HEAD_LINES} lines")
            own_header = path.suffix == ".c" and path.with_suffix(".h") in CODE
            if path.parts[0] == "src" and "Floor:" not in head[0] and not own_header:
                wrong.append(f"{path}: the head comment names no floor")
        self.assertEqual(wrong, [])

    def test_heads_of_kernels(self):
        wrong = []
        for path in KERNELS:
            lines = house.text(path).splitlines()
            head = next((n for n, line in enumerate(lines) if not line.startswith("//")), len(lines))
            if head == 0:
                wrong.append(f"{path}: no head comment")
            elif head > KERNEL_HEAD_LINES:
                wrong.append(f"{path}: the head comment has more than {KERNEL_HEAD_LINES} lines")
        self.assertEqual(wrong, [])

    def test_words(self):
        wrong = []
        for path in house.files():
            if path.suffix not in TEXT_SUFFIXES or path.name == "LICENSE":
                continue
            for number, line in enumerate(house.text(path).splitlines(), 1):
                if UNFINISHED.search(line) or PLACES.search(line):
                    wrong.append(f"{path}:{number}: {line.strip()}")
        self.assertEqual(wrong, [])

    def test_columns(self):
        wrong = [f"{path}:{number}" for paths, most in ((CODE, COLUMNS), (KERNELS, KERNEL_COLUMNS)) for path in paths
                 for number, line in enumerate(house.text(path).splitlines(), 1) if len(line) > most]
        self.assertEqual(wrong, [])

    def test_guards(self):
        """Every header has an include guard of its own."""
        headers = [f for f in CODE if f.suffix == ".h"]
        guards = [re.search(r"^#ifndef (\w+)\n#define \1$", house.text(f), flags=re.M) for f in headers]
        self.assertEqual([str(f) for f, g in zip(headers, guards) if not g], [], "no guard")
        self.assertEqual(len({g[1] for g in guards}), len(headers), "two headers share a guard")
        once = [str(f) for f in KERNELS if f.suffix == ".cuh" and "\n#pragma once\n" not in house.text(f)]
        self.assertEqual(once, [], "no #pragma once")


if __name__ == "__main__":
    unittest.main()
