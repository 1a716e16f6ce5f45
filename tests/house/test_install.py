"""`make install` gives everything that a program needs, found the way programs find libraries."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import house

PROGRAM = r"""
#include "flashback.h"
#include "flashback_dlpack.h"
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    float q = 1, k = 2, v = 3, out = 0;
    fb_desc desc;
    fb_desc_init(&desc, sizeof desc);
    desc.batch = desc.heads_q = desc.heads_kv = desc.len_q = desc.len_k = desc.head_dim = desc.head_dim_v = 1;
    fb_plan *plan;
    if (fb_plan_create(&plan, &desc) != FB_OK)
        return 1;
    fb_io io;
    fb_io_init(&io, sizeof io);
    io.q.data = &q, io.k.data = &k, io.v.data = &v, io.out.data = &out;
    io.workspace_size = fb_plan_workspace(plan), io.workspace.data = malloc(io.workspace_size);
    fb_status status = fb_forward(plan, &io);
    free(io.workspace.data);
    fb_plan_destroy(plan);
    printf("%s %g\n", fb_version(), (double)out);
    return status == FB_OK ? 0 : 2;
}
"""

PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(user LANGUAGES {language})
find_package(flashback {version} REQUIRED)
add_executable(shared main.{suffix})
target_link_libraries(shared flashback::flashback)
add_executable(static main.{suffix})
target_link_libraries(static flashback::static)
"""


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.top = pathlib.Path(cls.folder.name)
        # Moved once after the installation: nothing may depend on where it was.
        house.output(house.CMAKE, "--install", house.BUILD, "--prefix", cls.top / "first")
        cls.prefix = (cls.top / "first").rename(cls.top / "prefix")
        pc = next(cls.prefix.rglob("flashback.pc"))
        cls.libdir = pc.parents[1]
        cls.environment = dict(os.environ, PKG_CONFIG_PATH=str(pc.parent), LD_LIBRARY_PATH=str(cls.libdir))
        for suffix in ("c", "cpp"):
            (cls.top / f"main.{suffix}").write_text(PROGRAM)

    def runs(self, program):
        version, result = house.output(program, env=self.environment).split()
        self.assertEqual((version, result), (house.header_version(), "3"))

    def build(self, name, *flags):
        program = self.top / name
        house.output(house.CC, "-std=c11", self.top / "main.c", "-o", program, *flags)
        return program

    def pkg_config(self, *flags):
        return house.output("pkg-config", *flags, "flashback", env=self.environment).split()

    def test_files(self):
        have = {str(f.relative_to(self.prefix)) for f in self.prefix.rglob("*") if not f.is_dir()}
        lib, version = self.libdir.relative_to(self.prefix), house.header_version()
        want = {f"include/{h.name}" for h in house.files({".h"}, "include")}
        want |= {f"{lib}/{n}" for n in ("libflashback.a", "libflashback.so", f"libflashback.so.{version}",
                                        f"libflashback.so.{version.split('.')[0]}", "pkgconfig/flashback.pc",
                                        "cmake/flashback/flashback-config.cmake",
                                        "cmake/flashback/flashback-config-version.cmake",
                                        "cmake/flashback/flashback-targets.cmake")}
        want |= {"bin/flashback", "share/man/man1/flashback.1"}
        have = {f for f in have if not re.search(r"flashback-targets-\w+\.cmake$", f)}
        self.assertEqual(have, want)

    def test_no_file_knows_this_machine(self):
        for path in self.prefix.rglob("*"):
            if path.suffix in {".pc", ".cmake", ".h", ".1"}:
                for place in (str(house.ROOT), str(house.BUILD), str(self.top)):
                    self.assertNotIn(place, path.read_text(), path)

    def test_pkg_config_shared(self):
        program = self.build("shared", *self.pkg_config("--cflags", "--libs"))
        self.assertIn("libflashback.so", house.output("readelf", "-d", program))
        self.runs(program)

    def test_pkg_config_static(self):
        """The archive by name, and what it needs from Libs.private."""
        flags = self.pkg_config("--static", "--cflags", "--libs")
        self.assertIn("-lflashback", flags)
        flags = ["-l:libflashback.a" if f == "-lflashback" else f for f in flags]
        program = self.build("static", *flags)
        self.assertNotIn("libflashback", house.output("readelf", "-d", program))
        self.runs(program)

    def test_version(self):
        self.assertEqual(self.pkg_config("--modversion"), [house.header_version()])

    def configure(self, name, language, suffix, version):
        folder = self.top / name
        folder.mkdir()
        shutil.copy(self.top / f"main.{suffix}", folder)
        (folder / "CMakeLists.txt").write_text(PROJECT.format(language=language, suffix=suffix, version=version))
        return folder, [house.CMAKE, "-G", "Ninja", "-S", folder, "-B", folder / "build",
                        f"-DCMAKE_PREFIX_PATH={self.prefix}"]

    def test_find_package(self):
        version = ".".join(house.header_version().split(".")[:2])
        for language, suffix in (("C", "c"), ("CXX", "cpp")):
            with self.subTest(language=language):
                folder, command = self.configure(f"user_{suffix}", language, suffix, version)
                house.output(*command)
                house.output(house.CMAKE, "--build", folder / "build")
                self.runs(folder / "build/shared")
                self.runs(folder / "build/static")
                self.assertNotIn("libflashback", house.output("readelf", "-d", folder / "build/static"))

    def test_find_package_refuses_another_version(self):
        _, command = self.configure("future", "C", "c", "99.0")
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("99.0", done.stderr)


if __name__ == "__main__":
    unittest.main()
