"""Floors: code depends on what lies below it only, in its includes and in the symbols it links to."""

import pathlib
import re
import unittest

import house

# Folder -> folders it may include besides itself. The first that matches a path counts.
FLOORS = {
    "src/shared": set(),
    "src/base": set(),
    "src/core": {"src/base", "src/shared", "include"},
    "src/jit": {"src/core", "src/base", "src/shared", "include"},
    "src/cpu": {"src/core", "src/base", "src/shared", "include"},
    "src/cuda/kernels": {"src/shared"},
    "src/cuda": {"src/jit", "src/core", "src/base", "src/shared", "include"},
    "src/metal/kernels": {"src/metal", "src/shared"},  # of src/metal abi.h only
    "src/metal": {"src/jit", "src/core", "src/base", "src/shared", "include"},
    "src/api": {"src/cpu", "src/cuda", "src/metal", "src/core", "src/base", "src/shared", "include"},
    "include": set(),
    "harness": {"include"},
    "cli": {"include", "harness"},
    "bench": {"include", "harness"},
    "examples/gpt": {"include", "harness", "cli"},
    "tests/gpt": {"include", "harness", "cli", "examples/gpt"},
    "tests/fuzz": {"include", "harness", "cli"},
    "tests/unit": {"include", "harness", "cli", "src/cpu", "src/jit", "src/core", "src/base", "src/shared"},
    "tests/mock": set(),
    "tests/model": {"tests/mock"},
    "tests/cuda": {"include", "harness", "cli", "tests", "tests/mock", "src/cuda", "src/jit", "src/core", "src/base",
                   "src/shared"},
    "tests/metal/emulator": {"include", "harness", "tests", "tests/mock", "src/metal", "src/jit", "src/core",
                             "src/base", "src/shared"},
    "tests/metal": {"include", "harness", "cli", "tests", "tests/mock", "tests/metal/emulator", "src/metal", "src/jit",
                    "src/core", "src/base", "src/shared"},
    "tests": {"include", "harness"},
    "examples": {"include"},
}
BACKENDS = {"src/cpu", "src/cuda", "src/metal"}

LIBC = set("""assert ctype errno fenv float inttypes limits math setjmp signal stdarg stdatomic stdbool stddef stdint
    stdio stdlib string time fcntl getopt pthread regex sched strings unistd sys/mman sys/resource sys/stat sys/time
    sys/types sys/utsname sys/wait""".split())
CPU = {"omp", "immintrin", "arm_neon", "cpuid", "sys/auxv", "sys/syscall", "sys/sysctl"}
CODE = house.files(house.CODE_SUFFIXES | house.KERNEL_SUFFIXES)
SYSTEM = {  # headers of the system, for folders that may use others than libc's
    "src/shared": set(),
    "src/jit": LIBC | {"dirent", "sys/file"},
    "src/cpu": LIBC | CPU,
    "src/cuda/kernels": set(),
    "src/cuda": LIBC | {"dlfcn", "glob"},
    "src/metal/kernels": {"metal_stdlib", "metal_simdgroup_matrix"},
    "src/metal": LIBC | {"dlfcn"},
    "include": {"stddef", "stdint"},
    "harness": LIBC | CPU | {"dirent", "dlfcn"},
    "cli": LIBC | {"jansson"},
    "examples/gpt": LIBC | {"Accelerate/Accelerate", "cblas", "dirent", "omp"},
    "tests/gpt": LIBC | {"cmocka", "omp"},
    "tests/unit": LIBC | {"cmocka", "dirent"},
    "tests/cuda": LIBC | {"cmocka", "dlfcn"},
    "tests/metal/emulator": LIBC | {"cmocka", "dlfcn"},
    "tests/metal": LIBC | {"cmocka", "dlfcn"},
    "tests/model": LIBC | {"dlfcn", "elf"},
    "tests": LIBC | {"cmocka", "dlfcn"},
}


def floor(path):
    return next((f for f in FLOORS if path.as_posix().startswith(f + "/")), None)


def resolve(includer, name):
    """The file of the tree that an include in quotes means, or None."""
    for folder in (includer.parent, pathlib.Path("include"), pathlib.Path("."), pathlib.Path("src")):
        candidate = (house.ROOT / folder / name).resolve()
        if candidate.is_file():
            return candidate.relative_to(house.ROOT)
    return None


class Floors(unittest.TestCase):
    def test_every_folder_has_a_floor(self):
        homeless = [str(f) for f in CODE if floor(f) is None]
        self.assertEqual(homeless, [], "no row of FLOORS covers these")

    def test_includes_go_down(self):
        wrong = []
        for path in CODE:
            here = floor(path)
            for mark, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', house.text(path), flags=re.M):
                if mark == "<":
                    if name.removesuffix(".h") not in SYSTEM.get(here, LIBC):
                        wrong.append(f"{path}: <{name}> is not for {here}")
                    continue
                target = resolve(path, name)
                if target is None:
                    wrong.append(f'{path}: "{name}" is no file of the tree')
                elif floor(target) != here and floor(target) not in FLOORS[here]:
                    wrong.append(f'{path}: "{name}" lies in {floor(target)}, which {here} may not see')
        self.assertEqual(wrong, [])

    def test_symbols_go_down(self):
        """A declaration by hand would get round the includes; the linker's view does not lie."""
        floors = [f for f in FLOORS if f.startswith("src/")]
        home, needs = {}, []
        for here in floors:
            for path in house.objects(here):
                for name, kind, _ in house.symbols(path):
                    if kind.isupper() and kind != "U":
                        home[name] = here
                    elif kind == "U":
                        needs.append((here, path.name, name))
        self.assertTrue(home, "no object files found")
        wrong = [f"{here}/{obj} uses {name} of {home[name]}" for here, obj, name in needs
                 if name in home and home[name] != here and home[name] not in FLOORS[here]]
        self.assertEqual(wrong, [])

    def test_a_backend_is_one_symbol(self):
        for backend in BACKENDS:
            defined = {n for o in house.objects(backend) for n, k, _ in house.symbols(o) if k.isupper() and k != "U"}
            used = {n for f in FLOORS if f != backend and f.startswith("src/") for o in house.objects(f)
                    for n, k, _ in house.symbols(o) if k == "U" and n in defined}
            self.assertEqual(len(used), 1, f"the rest of the library uses {sorted(used)} of {backend}")


if __name__ == "__main__":
    unittest.main()
