"""The headers compile alone, as C11 and as C++17, without a warning from either compiler; and their ABI stays."""

import pathlib
import re
import shutil
import tempfile
import unittest

import house

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Wundef", "-Werror"]
ABI = pathlib.Path("tests/house/abi.txt")


def abi_rows():
    lines = [line.split("#")[0].split() for line in house.text(ABI).splitlines()]
    return [line for line in lines if line]


class Header(unittest.TestCase):
    def test_compiles_alone(self):
        missing = [c for c in ("gcc", "g++", "clang", "clang++") if not shutil.which(c)]
        self.assertEqual(missing, [], "tools/setup.sh test installs them")
        for header in house.files({".h"}, "include"):
            for compiler in ("gcc", "clang", "g++", "clang++"):
                language = ["-x", "c++", "-std=c++17"] if compiler.endswith("++") else ["-x", "c", "-std=c11"]
                with self.subTest(header=str(header), compiler=compiler):
                    house.output(compiler, *language, *WARNINGS, "-I", house.ROOT / "include", "-fsyntax-only",
                                 "-include", house.ROOT / header, "/dev/null")


class Abi(unittest.TestCase):
    """abi.txt holds offset and size of every field and the value of every constant. A field may be added at the
    end of a struct whose first field is its size; anything else breaks programs."""

    @classmethod
    def setUpClass(cls):
        cls.rows = abi_rows()
        lines = []
        for words in cls.rows:
            if len(words) == 3:
                struct, field = words[0].split(".")
                measures = f"offsetof({struct}, {field}), sizeof((({struct} *)0)->{field})"
                lines.append(f'printf("{words[0]} %zu %zu\\n", {measures});')
            elif words[0].startswith("FB_"):
                lines.append(f'printf("{words[0]} %lld\\n", (long long){words[0]});')
            else:
                lines.append(f'printf("{words[0]} %zu\\n", sizeof({words[0]}));')
        program = '#include "flashback.h"\n#include "flashback_dlpack.h"\n#include <stdio.h>\nint main(void) {\n'
        program += "\n".join(lines) + "\n}\n"
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "abi.c")
            source.write_text(program)
            house.output(house.CC, "-std=c11", "-I", house.ROOT / "include", source, "-o", f"{folder}/abi")
            cls.printed = [line.split() for line in house.output(f"{folder}/abi").splitlines()]

    def test_as_recorded(self):
        self.assertEqual(self.printed, self.rows)

    def test_structs_are_recorded_whole(self):
        """Fields follow each other without holes, so that none is missing from the table."""
        sizes = {words[0]: int(words[1]) for words in self.rows if len(words) == 2 and not words[0].startswith("FB_")}
        ends = dict.fromkeys(sizes, 0)
        for name, offset, size in (words for words in self.rows if len(words) == 3):
            struct = name.split(".")[0]
            self.assertEqual(int(offset), ends[struct], f"a hole or a missing field before {name}")
            ends[struct] = int(offset) + int(size)
        self.assertEqual({s: e for s, e in ends.items() if e}, {s: sizes[s] for s, e in ends.items() if e})

    def test_constants_are_recorded(self):
        code = "".join(house.without_comments(house.text(h)) for h in house.files({".h"}, "include"))
        enums = " ".join(re.findall(r"enum \w+ \{(.*?)\}", code, flags=re.S))
        names = set(re.findall(r"\bFB_[A-Z0-9_]+(?= =)", enums))
        names |= set(re.findall(r"^#define (FB_[A-Z0-9_]+)\s+(?:\\\n\s*)?[(0-9I]", code, flags=re.M))
        names -= {n for n in names if n.startswith("FB_VERSION_")}
        self.assertEqual(names, {words[0] for words in self.rows if words[0].startswith("FB_")})

    def test_structs_are_recorded(self):
        code = "".join(house.without_comments(house.text(h)) for h in house.files({".h"}, "include"))
        structs = set(re.findall(r"typedef struct (\w+) \{", code))
        self.assertEqual(structs, {words[0] for words in self.rows if len(words) == 2 and words[0].startswith("fb_")})


if __name__ == "__main__":
    unittest.main()
