"""What the tests of Metal's kernels share: the library's own texts, as they are or with a fault in them, through the
whole library on the emulator."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLASHBACK = os.environ["FLASHBACK"]
MODEL = os.environ["FLASHBACK_METAL_MODEL"]  # folder of the mock that runs
CLANG = os.environ["FLASHBACK_CLANG"]
TSAN = os.environ.get("FLASHBACK_TSAN", "")  # the library of ThreadSanitizer
ALL = "TEST_ALL" in os.environ  # what takes minutes
KERNELS = ("forward.metal", "dq.metal", "dkdv.metal", "dbias.metal", "rows.metal", "unfused.metal")


def check(filter, kernels=None, races=False, counts=False, checked=False, route="fused"):
    """`flashback check` of Metal: exit code, all that it says, and the dispatches where `counts` asks for them."""
    environment = dict(os.environ, LD_LIBRARY_PATH=MODEL, OMP_NUM_THREADS="1")
    if kernels:
        environment["FLASHBACK_KERNELS"] = str(kernels)
    if races:
        environment |= {"LD_PRELOAD": TSAN, "TSAN_OPTIONS": "halt_on_error=0 exitcode=66"}
    if checked or counts:
        environment["EMULATOR_CHECKED"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        environment["EMULATOR_COUNTS"] = f"{folder}/counts"
        done = subprocess.run([FLASHBACK, "check", "--device", "metal", "--route", route, "--filter", filter],
                              env=environment, capture_output=True, text=True)
        lines = pathlib.Path(folder, "counts").read_text().splitlines() if counts else []
    rows = [json.loads(line) for line in lines if "fb_layout" not in line]  # which a device is asked once
    return done.returncode, done.stdout + done.stderr, rows


@contextlib.contextmanager
def edited(name, old, new, count=1):
    """A folder of kernels in which `count` places of a file are others."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("metal", "shared"):
            shutil.copytree(ROOT / "src" / part, f"{folder}/{part}")
        path = pathlib.Path(folder, "metal/kernels", name)
        text = path.read_text()
        if text.count(old) != count:
            raise AssertionError(f"{name} has {text.count(old)} times what this test changes, not {count}: {old}")
        path.write_text(text.replace(old, new))
        yield path.parent


def flat(name, defines, kernels=ROOT / "src/metal/kernels"):
    """A kernel's text as one piece, as src/jit/source.c makes it."""
    places, seen = (kernels, kernels / "..", kernels / "../../shared"), set()

    def add(name):
        if name in seen:
            return ""
        seen.add(name)
        path = next(p / name for p in places if (p / name).exists())
        text = f'#line 1 "{name}"\n'
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = re.match(r'\s*#\s*include\s*"(?:[^"]*/)?([^"]+)"', line)
            if include:
                text += add(include[1]) + f'#line {number + 1} "{name}"\n'
            else:
                text += ("" if "#pragma once" in line else line) + "\n"
        return text

    return "".join(f"#define FB_{k} {v}\n" for k, v in defines.items()) + add(name)
