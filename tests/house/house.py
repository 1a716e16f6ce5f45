"""What the house tests share: the tree, its C files without comments, the build they are run for."""

import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIB = pathlib.Path(os.environ["FLASHBACK_LIB"])
ARCHIVE = pathlib.Path(os.environ["FLASHBACK_ARCHIVE"])
BUILD = pathlib.Path(os.environ["FLASHBACK_BUILD"])
CMAKE = os.environ["FLASHBACK_CMAKE"]
CC = os.environ["FLASHBACK_CC"]

SKIPPED_FOLDERS = {".git", "build", "__pycache__"}
CODE_SUFFIXES = {".c", ".h", ".inc"}
KERNEL_SUFFIXES = {".cu", ".cuh", ".metal", ".msl"}


def files(suffixes=None, under="."):
    """Files of the tree as paths from its top, sorted; those that a build left behind are not part of it."""
    found = []
    for folder, folders, names in os.walk(ROOT / under):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS]
        found += [pathlib.Path(folder, n).relative_to(ROOT) for n in names]
    return sorted(f for f in found if suffixes is None or f.suffix in suffixes)


def text(path):
    return (ROOT / path).read_text(encoding="utf-8")


def without_comments(code):
    """C code with comments blanked and line numbers kept."""
    pattern = r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'"""
    blank = lambda m: re.sub(r"[^\n]", " ", m[0]) if m[0].startswith("/") else m[0]
    return re.sub(pattern, blank, code, flags=re.S)


def output(*command, **options):
    """The standard output of a command that has to succeed; its words are the failure otherwise."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def public_names():
    """Names of the functions that the headers declare with FB_API."""
    code = "".join(without_comments(text(h)) for h in files({".h"}, "include"))
    return set(re.findall(r"^FB_API\b[^;(]*?\b(fb_\w+)\(", code, flags=re.M))


def header_version():
    return ".".join(re.findall(r"#define FB_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text("include/flashback.h")))


def objects(folder):
    """Object files of one folder of sources, in the build under test."""
    return sorted(f for f in BUILD.rglob("*.o") if f"/{folder}/" in f"/{f.relative_to(BUILD)}")


def symbols(path):
    """Rows (name, kind, section) of an object file or library; kind is nm's letter."""
    rows = []
    for line in output("nm", "--format=sysv", path).splitlines():
        cells = [c.strip() for c in line.split("|")]
        if len(cells) == 7 and cells[0] != "Name":
            rows.append((cells[0], cells[2], cells[6]))
    return rows
