"""Documents: their programs build and run, their commands and links exist, their tables say what the code says.

A block marked ```c is a whole program (it has a main, and must exit with 0) or declarations that compile after
#include "flashback.h". In a block marked ```sh every `make target` and every `flashback verb` exists."""

import pathlib
import re
import tempfile
import unittest

import house

DOCUMENTS = [d for d in house.files({".md"}) if d.parent == pathlib.Path(".") or d.parts[0] == "docs"]
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror"]


def blocks(language):
    """(document, line, text) of every block marked with the language."""
    for document in DOCUMENTS:
        words = house.text(document)
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", words, flags=re.M | re.S):
            yield document, words.count("\n", 0, match.start()) + 2, match[1]


class Documents(unittest.TestCase):
    def test_there_are_some(self):
        self.assertIn(pathlib.Path("README.md"), DOCUMENTS)
        self.assertTrue(any(d.parts[0] == "docs" for d in DOCUMENTS), "docs/ is empty")

    def test_programs(self):
        include, static = house.ROOT / "include", [house.LIB, f"-Wl,-rpath,{house.LIB.parent}", "-lm"]
        for document, line, code in blocks("c"):
            with self.subTest(document=str(document), line=line), tempfile.TemporaryDirectory() as folder:
                source = pathlib.Path(folder, "block.c")
                whole = re.search(r"\bmain\(", code)
                source.write_text(code if whole else f'#include "flashback.h"\n{code}')
                if whole:
                    house.output(house.CC, *WARNINGS, "-I", include, source, "-o", f"{folder}/block", *static)
                    house.output(f"{folder}/block", cwd=folder)
                else:
                    house.output(house.CC, *WARNINGS, "-I", include, "-fsyntax-only", source)

    def test_quick_start_is_the_example(self):
        programs = [code for d, _, code in blocks("c") if d == pathlib.Path("README.md")]
        self.assertIn(house.text("examples/first.c"), programs)

    def test_make_targets(self):
        targets = set(re.findall(r"^([a-z][a-z-]*):", house.text("Makefile"), flags=re.M))
        wrong = [f"{d}:{line}: make {t}" for d, line, code in blocks("sh")
                 for t in re.findall(r"^\s*make ([a-z-]+)", code, flags=re.M) if t not in targets]
        self.assertEqual(wrong, [])

    def test_verbs(self):
        program = house.BUILD / "flashback"
        verbs = {v for _, _, code in blocks("sh")
                 for v in re.findall(r"(?:^|[/;&|] *)flashback ([a-z]+)", code, flags=re.M)}
        for verb in sorted(verbs):
            house.output(program, verb, "--help")

    def test_links(self):
        wrong = []
        for document in DOCUMENTS:
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", house.text(document)):
                if "://" not in target and not (house.ROOT / document.parent / target).exists():
                    wrong.append(f"{document}: {target}")
        self.assertEqual(wrong, [])

    def test_environment_variables(self):
        """The header, the documents and base/env.c name the same variables; documents also those of Python's package."""
        code = "".join(house.without_comments(house.text(f)) for f in house.files({".c", ".h"}, "src/base"))
        read = set(re.findall(r"\bX\((FLASHBACK_[A-Z_]+),", code))
        header = set(re.findall(r"^ \* +(FLASHBACK_[A-Z_]+) ", house.text("include/flashback.h"), flags=re.M))
        self.assertEqual(header, read)
        options = set(re.findall(r"\b(FLASHBACK_[A-Z]+)\b", house.text("cmake/options.cmake")))
        package = "".join(house.text(f) for f in house.files({".py"}, "bindings"))
        options |= set(re.findall(r"environ\.get\(\"(FLASHBACK_[A-Z_]+)\"", package))
        for document in DOCUMENTS:
            named = set(re.findall(r"\bFLASHBACK_[A-Z_]+\b", house.text(document)))
            self.assertEqual(named - read - options - {"FLASHBACK_H"}, set(), document)


if __name__ == "__main__":
    unittest.main()
