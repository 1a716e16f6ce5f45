"""flashback beside PyTorch's CPU attention: both passes of the same problems in one process, on the same tensors and
the same number of threads, in turn. Prints Markdown; --jsonl appends a row for every line. README.md says how to read
it."""

import argparse
import datetime
import gc
import json
import math
import os
import platform
import re
import statistics
import sys
import time

import targets

SHAPES = ((64, 512, 8, 4), (64, 2048, 8, 1), (128, 512, 8, 4), (128, 2048, 8, 1), (64, 4096, 8, 1))  # D, L, H, B
MATH_LENGTH = 2048  # longest for the unfused kernel, which keeps [L, L] for every head
LEAST_RUNS = 5
PASSES = (False, True)  # is it the backward?


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default=os.environ.get("FLASHBACK_LIB", "build/release/libflashback.so"),
                        help="the shared library (default: FLASHBACK_LIB, else that of `make build`)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=0, help="of both libraries (default: PyTorch's choice)")
    parser.add_argument("--min-time", type=float, default=0.5, metavar="S",
                        help="seconds that each side is timed for, and 5 runs at least (default 0.5)")  # fmt: skip
    parser.add_argument("--dtypes", default="f32,bf16,f16", help="of f32, bf16, f16 (default all)")
    parser.add_argument("--filter", default="", metavar="REGEX", help="cases whose name has it, as in"
                        " f32.b4h8.l512.d64.causal.fwd")  # fmt: skip
    parser.add_argument("--jsonl", metavar="FILE", help="append a JSON object for each line printed")
    parser.add_argument("--no-accuracy", action="store_true", help="speed only")
    parser.add_argument("--no-math", action="store_true", help="leave PyTorch's unfused kernel out")
    options = parser.parse_args()
    options.dtypes = options.dtypes.split(",")
    for name in options.dtypes:
        if name not in ("f32", "bf16", "f16"):
            parser.error(f"--dtypes: '{name}' is not one of f32, bf16, f16")
    if not os.path.exists(options.lib):
        parser.error(f"--lib: there is no '{options.lib}'; `make build` makes one")
    os.environ["FLASHBACK_LIB"] = os.path.abspath(options.lib)
    return options


def settle_waiting(separate):
    """Where each library has threads of its own, those of the one that has just finished spin for some time and would
    take cores from the other. So both are told to sleep at once, by starting again: a runtime reads it when it is
    loaded."""
    if separate and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.argv])


def processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def in_turn(calls, seconds):
    """Medians in ms of several calls that take turns, after one round that does not count."""
    for call in calls:
        call()
    times = [[] for _ in calls]
    gc.disable()
    start = time.perf_counter()
    while len(times[0]) < LEAST_RUNS or time.perf_counter() - start < seconds * len(calls):
        for call, taken in zip(calls, times):
            begin = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - begin))
    gc.enable()
    return [statistics.median(taken) for taken in times], len(times[0])


class Table:
    """Rows on standard output and, with more in them, in a file of JSON lines."""

    def __init__(self, path, common):
        self.file, self.common = open(path, "a", encoding="utf-8") if path else None, common

    def head(self, *columns):
        print("|", " | ".join(columns), "|")
        print("|", " | ".join("---" for _ in columns), "|", flush=True)

    def line(self, row, *cells):
        print("|", " | ".join(cells), "|", flush=True)
        if self.file:
            self.file.write(json.dumps({**row, **self.common}) + "\n")
            self.file.flush()


def describe(case, **more):
    return {
        "batch": case.batch, "heads": case.heads, "length": case.length, "head_dim": case.dim, "dtype": case.dtype,
        "mask": case.mask, **more,
    }  # fmt: skip


def measure_speed(table, options, case, backward, ours, flash, unfused, target):
    """One line: rates in GFLOP/s, ratios as their time over ours."""
    name = "backward" if backward else "forward"
    for side in (ours, flash):
        side.forward()
    (our_ms, their_ms), runs = in_turn([getattr(ours, name), getattr(flash, name)], options.min_time)
    math_ratio = math_ms = None
    if unfused:
        unfused.forward()
        (again, math_ms), _ = in_turn([getattr(ours, name), getattr(unfused, name)], options.min_time / 2)
        math_ratio = math_ms / again
        unfused.out = None  # its graph holds [L, L]
    rate = lambda ms: case.flops(backward) / ms * 1e-6
    ratio = their_ms / our_ms
    met = targets.verdict(ratio, target)
    must, stretch = target or (None, None)
    row = describe(case, kind="speed", **{"pass": "bwd" if backward else "fwd"}, isa=ours.isa(), runs=runs, ms=our_ms,
                   torch_flash_ms=their_ms, torch_math_ms=math_ms, gflops=rate(our_ms),
                   torch_flash_gflops=rate(their_ms), ratio=ratio, math_ratio=math_ratio, must=must, stretch=stretch,
                   met=met)  # fmt: skip
    table.line(row, case.dtype, f"{case.batch},{case.heads},{case.length},{case.dim}", case.mask, row["pass"],
               row["isa"], f"{rate(our_ms):.0f}", f"{rate(their_ms):.0f}", f"{ratio:.2f}", *words(target), met,
               f"{math_ratio:.2f}" if math_ratio else "-")  # fmt: skip
    return met


def words(target):
    return (f"{target[0]:g}", f"{target[1]:g}") if target else ("-", "-")


def find_errors(sides, case, ours, flash, tensors):
    """Errors of both against float64. Ours has NaN in every result before it runs."""
    found = {
        "flashback": {"out": ours.forward(poison=True), **dict(zip(sides.GRADIENTS, ours.backward(poison=True)))},
        "torch": {"out": flash.forward(), **dict(zip(sides.GRADIENTS, flash.backward()))},
    }
    return sides.errors(found, case, *tensors)


def print_errors(table, case, found):
    """A line for each tensor; gives what became of the targets."""
    verdicts = []
    for name, (our_max, our_rms) in found["flashback"].items():
        their_max, their_rms = found["torch"][name]
        both = (our_max, their_max), (our_rms, their_rms)
        ratios = [ours / theirs if theirs else math.inf for ours, theirs in both]
        least = found["rounded"][name][1]
        target = targets.accuracy(case, name)
        met = targets.verdict(ratios[1], target, at_most=True)
        must, stretch = target or (None, None)
        row = describe(case, kind="accuracy", tensor=name, max=our_max, rms=our_rms, torch_max=their_max,
                       torch_rms=their_rms, rounded_rms=least, ratio_max=ratios[0], ratio_rms=ratios[1], must=must,
                       stretch=stretch, met=met)  # fmt: skip
        table.line(row, case.dtype, f"{case.batch},{case.heads},{case.length},{case.dim}", case.mask, name,
                   f"{our_max:.2e}", f"{their_max:.2e}", f"{ratios[0]:.3f}", f"{our_rms:.2e}", f"{their_rms:.2e}",
                   f"{least:.2e}", f"{ratios[1]:.3f}", *words(target), met)  # fmt: skip
        verdicts.append(met)
    return verdicts


def select(options):
    """[(case, its passes that the filter leaves)]"""
    chosen = []
    for dtype in options.dtypes:
        for dim, length, heads, batch in SHAPES:
            for causal in (True, False):
                case = targets.Case(dtype, dim, length, heads, batch, causal)
                passes = [b for b in PASSES if re.search(options.filter, case.name(b))]
                chosen += [(case, passes)] if passes else []
    return chosen


def summary(verdicts, what):
    asked = [v for v in verdicts if v != "-"]
    met, stretch = sum(v != "no" for v in asked), sum(v == "stretch" for v in asked)
    print(f"\n{what}: {met} of {len(asked)} reach what they must, {stretch} of these the stretch.")


def main():
    options = read_options()
    import sides
    import torch

    lib = sides.flashback.load()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    threads, matrices = torch.get_num_threads(), targets.matrix_class()
    separate = sides.separate_pools(lib, threads)
    settle_waiting(separate)
    common = {
        "machine": processor(), "threads": threads, "version": lib.fb_version().decode(), "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(), "matrices": matrices, "isa_cap": os.environ.get("FLASHBACK_ISA"),
        "separate_pools": separate, "openmp": [os.path.basename(path) for path in sides.openmp_runtimes()],
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"), "spin_count": os.environ.get("GOMP_SPINCOUNT"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(f"flashback {common['version']} beside PyTorch {torch.__version__}, {threads} threads each,"
          f" {common['machine']}, 16-bit products by: {matrices}")  # fmt: skip
    print(f"OpenMP: {', '.join(common['openmp'])}; {'threads of their own' if separate else 'the same threads'};"
          f" OMP_WAIT_POLICY={common['wait_policy']}"
          f" GOMP_SPINCOUNT={common['spin_count']}\n")  # fmt: skip

    table, speeds, accuracies = Table(options.jsonl, common), [], []
    table.head("dtype", "B,H,L,D", "mask", "pass", "isa", "GFLOP/s", "PyTorch", "ratio", "must", "stretch", "met",
               "ratio to unfused")  # fmt: skip
    for seed, (case, passes) in enumerate(select(options)):
        torch.manual_seed(seed)
        size = (case.batch, case.heads, case.length, case.dim)
        tensors = [torch.randn(size).to(sides.DTYPES[case.dtype]) for _ in range(4)]  # q, k, v, dout
        ours, flash = sides.Flashback(lib, case, threads, *tensors), sides.Torch("flash", case, *tensors)
        with_math = case.length <= MATH_LENGTH and not options.no_math
        unfused = sides.Torch("math", case, *tensors) if with_math else None
        for backward in passes:
            target = targets.speed(case, backward, matrices, targets.has_f16_matrices())
            speeds.append(measure_speed(table, options, case, backward, ours, flash, unfused, target))
        if not options.no_accuracy:
            accuracies.append((case, find_errors(sides, case, ours, flash, tensors)))
        ours.close()
    summary(speeds, "Speed")

    if accuracies:
        print("\nErrors against float64 on the same inputs:\n")
        table.head("dtype", "B,H,L,D", "mask", "tensor", "max", "PyTorch", "ratio", "RMS", "PyTorch", "least", "ratio",
                   "must", "stretch", "met")  # fmt: skip
        summary([met for case, found in accuracies for met in print_errors(table, case, found)], "Accuracy")


if __name__ == "__main__":
    main()
