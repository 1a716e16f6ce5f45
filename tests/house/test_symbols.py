"""Symbols: what the libraries export, need and keep, as the linker sees it."""

import re
import unittest

import house

# Writable data that outlives a call, as name: (section, reason).
STATE = {
    "error_text": (".tbss", "the sentence of the calling thread that fb_last_error returns"),
    "forked": (".bss", "set once in a child of fork, which has one thread then; OpenMP's old threads are gone there"),
    "proven": (".tdata", "how large a team the calling thread has seen to start; the runtime ends the process otherwise"),
    "cap": (".tdata", "how large a team the calling thread may have after one could not start"),
}
WRITABLE = re.compile(r"\.(data|bss|tdata|tbss|ldata|lbss)(?!\.rel\.ro)|\*COM\*")

# The library never prints, exits or aborts (R20); only base/env.c reads the environment.
BANNED = set("""exit _exit quick_exit abort __assert_fail printf vprintf fprintf vfprintf puts fputs putchar fputc putc
    perror fwrite __printf_chk __fprintf_chk __vprintf_chk __vfprintf_chk stdout stderr signal sigaction setenv putenv
    system popen""".split())
ENVIRONMENT = {"getenv", "secure_getenv", "__environ", "environ"}

NEEDED = re.compile(r"lib(c|m|gomp|omp|pthread)\.so|ld-linux")


class Symbols(unittest.TestCase):
    def test_exports_are_the_header(self):
        lines = house.output("nm", "-D", "--defined-only", house.LIB).splitlines()
        self.assertEqual({line.split()[-1] for line in lines}, house.public_names())

    def test_archive_names_are_ours(self):
        public = house.public_names()
        names = {n for n, k, _ in house.symbols(house.ARCHIVE) if k.isupper() and k != "U"}
        self.assertEqual(public - names, set(), "declared, but not there")
        strangers = {n for n in names - public if not n.startswith("fb__")}
        self.assertEqual(strangers, set(), "global names that are neither public nor start with fb__")

    def test_no_state(self):
        found = {n.split(".")[0]: s for n, k, s in house.symbols(house.ARCHIVE) if k != "U" and WRITABLE.match(s)}
        self.assertEqual(found, {name: section for name, (section, _) in STATE.items()})

    def test_calls_nothing_banned(self):
        wrong = []
        for path in house.objects("src"):
            needs = {n for n, k, _ in house.symbols(path) if k == "U"}
            banned = BANNED if path.name == "env.c.o" else BANNED | ENVIRONMENT
            wrong += [f"{path.name} needs {n}" for n in sorted(needs & banned)]
        self.assertEqual(wrong, [])

    def test_needs_libc_libm_openmp_only(self):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", house.output("readelf", "-dW", house.LIB))
        self.assertTrue(needed)
        self.assertEqual([n for n in needed if not NEEDED.match(n)], [])

    def test_globals_are_shared(self):
        """A global that no other file uses belongs into its file, as static."""
        public, defined, used = house.public_names(), {}, {}
        for path in sum(map(house.objects, ["src", "harness", "cli", "examples", "tests"]), []):
            if path.parent.name in ("mock", "model", "emulator"):
                continue  # libraries of their own, whose names are looked up at run time
            for name, kind, _ in house.symbols(path):
                if kind in "Uvw":  # w and v: a reference that may stay open
                    used.setdefault(name, set()).add(path)
                elif kind.isupper():
                    defined.setdefault(name, path)
        alone = [f"{n} in {p.name}" for n, p in defined.items()
                 if n not in public and n not in used and n not in {"main", "LLVMFuzzerTestOneInput", "posix_memalign"}]
        self.assertEqual(sorted(alone), [])


if __name__ == "__main__":
    unittest.main()
