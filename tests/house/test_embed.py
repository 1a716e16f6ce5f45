"""cmake/embed.cmake: whatever a kernel file holds is in the library, byte for byte; lines end in \\n alone."""

import pathlib
import subprocess
import tempfile
import unittest

import house

FILES = {
    "plain.cu": b"int x;\n",
    "empty.cuh": b"",
    "open.cuh": b"no newline at the end",
    "odd.metal": b'"quoted" \'c\' \\ \\n \\\\" ??= ??/\n\\\n;;a;b[c]]d[ ${x} @x@ $ENV{HOME} %d %\ta\rb\n\n\n#"\xc3\xa9\xe2\x88\x91 1"\x01f\n',
    "long.h": b"".join(b"// line %d of a text longer than compilers have to take\n" % i for i in range(20000)),
}

PROGRAM = r"""
#include "jit/source.h"
#include <stdio.h>
#include <string.h>

int main(int count, char **names) {
    for (const fb__jit_file *f = fb__jit_files; f->name; f++)
        for (int i = 1; i < count; i++)
            if (strcmp(f->name, names[i]) == 0)
                fwrite(f->text, 1, f->size + (f->text[f->size] != 0), stdout);
    if (count == 1)
        for (const fb__jit_file *f = fb__jit_files; f->name; f++)
            puts(f->name);
    return 0;
}
"""


class Embed(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.top = pathlib.Path(folder.name)

    def embed(self, *paths):
        (self.top / "list").write_text("".join(f"{p}\n" for p in paths))
        return subprocess.run([house.CMAKE, f"-DLIST={self.top}/list", f"-DOUTPUT={self.top}/embedded.c", "-P",
                               house.ROOT / "cmake/embed.cmake"], capture_output=True, text=True)

    def build(self):
        (self.top / "main.c").write_text(PROGRAM)
        house.output(house.CC, "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", house.ROOT / "include",
                     "-I", house.ROOT / "src", self.top / "main.c", self.top / "embedded.c", "-o", self.top / "show")
        return self.top / "show"

    def test_bytes(self):
        for name, content in FILES.items():
            (self.top / name).write_bytes(content)
        done = self.embed(*(self.top / n for n in FILES))
        self.assertEqual(done.returncode, 0, done.stderr)
        program = self.build()
        self.assertEqual(house.output(program).split(), list(FILES))
        for name, content in FILES.items():
            self.assertEqual(subprocess.run([program, name], capture_output=True).stdout, content, name)

    def test_no_files(self):
        self.assertEqual(self.embed().returncode, 0)
        self.assertEqual(house.output(self.build()), "")

    def test_same_name(self):
        for folder in ("a", "b"):
            (self.top / folder).mkdir()
            (self.top / folder / "x.h").write_text("")
        done = self.embed(self.top / "a/x.h", self.top / "b/x.h")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("b/x.h", done.stderr)


if __name__ == "__main__":
    unittest.main()
