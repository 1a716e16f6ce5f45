"""One version: the header's; the library, its file, the changelog and the program all say the same."""

import ctypes
import re
import unittest

import house


class Versions(unittest.TestCase):
    def test_library(self):
        library = ctypes.CDLL(str(house.LIB))
        library.fb_version.restype = ctypes.c_char_p
        self.assertEqual(library.fb_version().decode(), house.header_version())

    def test_file_name(self):
        self.assertEqual(house.LIB.resolve().name, f"libflashback.so.{house.header_version()}")

    def test_changelog(self):
        """Its newest entry is this version; older ones follow in order."""
        found = re.findall(r"^## (\d+\.\d+\.\d+)", house.text("CHANGELOG.md"), flags=re.M)
        self.assertEqual(found[:1], [house.header_version()])
        numbers = [tuple(map(int, v.split("."))) for v in found]
        self.assertEqual(numbers, sorted(numbers, reverse=True))

    def test_program(self):
        self.assertIn(house.header_version(), house.output(house.BUILD / "flashback", "--version"))


if __name__ == "__main__":
    unittest.main()
