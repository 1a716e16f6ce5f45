"""flashback beside PyTorch's attention on a GPU: both passes of the same problems in one process, on the same tensors,
in turn, with an event before and after every call. Prints Markdown; --jsonl appends a row for every line. README.md
says how to read it."""

import argparse
import ctypes
import datetime
import gc
import json
import math
import os
import pathlib
import re
import statistics
import sys

import gpu_cases

FUSED = ("fa2", "cudnn", "fa3")
DIRECTIONS = ("fwd", "bwd")
NO_DEVICE = "status 3:"  # how flashback_ctypes.check begins for FB_NO_DEVICE, which no other problem would mend
LEAST_RUNS, MOST_RUNS, WARM_UP = 5, 1000, 2
MOST_DIFFERENCE = 0.05  # of results, as a share of their size; roundings to 16 bits leave about 0.01
MOST_SCORE_BYTES = 12e9  # for the unfused formula, which keeps several matrices of that size
SLEEP_CYCLES = 2_000_000  # about a millisecond, in which the host queues a round of calls


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default=os.environ.get("FLASHBACK_LIB", "build/release/libflashback.so"),
                        help="the shared library (default: FLASHBACK_LIB, else that of `make build`)")  # fmt: skip
    parser.add_argument("--set", default="all", choices=gpu_cases.SETS, help="of problems (default all)")
    parser.add_argument("--filter", default="", metavar="REGEX", help="cases whose name has it, as in"
                        " bf16.b1h16k16.l16384.d128.causal.bwd")  # fmt: skip
    parser.add_argument("--peers", default="fa2,cudnn,unfused",
                        help="of fa2, cudnn, fa3, unfused (default all but fa3)")  # fmt: skip
    parser.add_argument("--fa3", metavar="FOLDER", help="where FlashAttention-3's flash_attn_interface is; adds the"
                        " peer fa3")  # fmt: skip
    parser.add_argument("--min-time", type=float, default=0.06, metavar="S",
                        help="seconds that each side is timed for, and 5 runs at least (default 0.06)")  # fmt: skip
    parser.add_argument("--ahead", action="store_true", help="let the host queue a whole round before the GPU begins"
                        " it: times without what the host costs")  # fmt: skip
    parser.add_argument("--accuracy", action="store_true", help="compare all sides with float64 as well")
    parser.add_argument("--index", type=int, default=0, help="which CUDA device (default 0)")
    parser.add_argument("--jsonl", metavar="FILE", help="append a JSON object for each line printed")
    options = parser.parse_args()
    options.peers = options.peers.split(",") + (["fa3"] if options.fa3 else [])
    for name in options.peers:
        if name not in (*FUSED, "unfused"):
            parser.error(f"--peers: '{name}' is not one of fa2, cudnn, fa3, unfused")
    if options.fa3:
        sys.path.insert(0, options.fa3)
    if not os.path.exists(options.lib):
        parser.error(f"--lib: there is no '{options.lib}'; `make build` makes one")
    os.environ["FLASHBACK_LIB"] = os.path.abspath(options.lib)
    return options


def load_torch(index):
    """PyTorch with a GPU, or the end with a sentence."""
    try:
        import torch
    except ImportError as error:
        sys.exit(f"gpu.py: this Python has no PyTorch ({error}); bench/peers/README.md says which is tried")
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        sys.exit(f"gpu.py: PyTorch {torch.__version__} sees no CUDA device {index}; is there a GPU, and does"
                 " CUDA_VISIBLE_DEVICES hide it?")  # fmt: skip
    torch.cuda.set_device(index)
    return torch


# ---- Where -----------------------------------------------------------------------------------------------------------


def info_lines(lib):
    """fb_info as a dictionary."""
    text = ctypes.create_string_buffer(16384)
    lib.fb_info.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    lib.fb_info(text, len(text))
    lines = (line.split(": ", 1) for line in text.value.decode().splitlines() if ": " in line)
    return {key.strip(): value for key, value in lines}


def module_version():
    """Of the driver's kernel module."""
    try:
        words = pathlib.Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "?"
    found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", words)
    return found[1] if found else "?"


def describe_place(torch, lib, options):
    info = info_lines(lib)
    return {
        "machine": torch.cuda.get_device_name(),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "driver": module_version(), "cuda": info.get("cuda driver", "?"),
        "nvrtc": info.get("cuda compiler", "?").split(",")[0], "version": lib.fb_version().decode(),
        "torch": torch.__version__, "torch_cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "seconds": options.min_time, "ahead": options.ahead,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }  # fmt: skip


# ---- Times -----------------------------------------------------------------------------------------------------------


def in_turn(torch, calls, seconds, ahead):
    """Medians in ms of two calls that take turns, each first in every other round; and the number of rounds."""
    event = lambda: torch.cuda.Event(enable_timing=True)

    def round_of(order):
        if ahead:
            torch.cuda._sleep(SLEEP_CYCLES)
        pairs = {}
        for n in order:
            pairs[n] = event(), event()
            pairs[n][0].record()
            calls[n]()
            pairs[n][1].record()
        return pairs

    for _ in range(WARM_UP):
        first = round_of((0, 1))
    torch.cuda.synchronize()
    once = sum(begin.elapsed_time(end) for begin, end in first.values())
    rounds = min(max(LEAST_RUNS, int(2e3 * seconds / max(once, 1e-3))), MOST_RUNS)
    gc.disable()
    taken = [round_of((n % 2, 1 - n % 2)) for n in range(rounds)]
    torch.cuda.synchronize()
    gc.enable()
    return [statistics.median(pairs[n][0].elapsed_time(pairs[n][1]) for pairs in taken) for n in (0, 1)], rounds


def time_pass(torch, options, direction, ours, theirs):
    name = "forward" if direction == "fwd" else "backward"
    with theirs.context():
        ours.forward()
        theirs.forward()
        return in_turn(torch, [getattr(ours, name), getattr(theirs, name)], options.min_time, options.ahead)


def first_line(error):
    lines = str(error).splitlines()
    return lines[0][:160] if lines else type(error).__name__


def measure_peer(torch, sides, options, case, name, directions, ours, tensors):
    """{"fwd": (our ms, their ms), "bwd": ..., "both": ..., "bytes": their extra memory, "runs": ...,
    "differs": of the results}, or {"error": a sentence} where the peer cannot do it."""
    if name == "unfused" and case.score_bytes() > MOST_SCORE_BYTES:
        return {"error": f"its scores take {case.score_bytes() * 1e-9:.1f} GB each"}
    theirs = None
    found = {}
    try:
        theirs = sides.PEERS[name](case, *tensors)
        found["bytes"] = theirs.extra_bytes()
        for direction in directions:
            found[direction], found["runs"] = time_pass(torch, options, direction, ours, theirs)
        if len(directions) == 2:
            found["both"] = [sum(found[d][n] for d in directions) for n in (0, 1)]
        with theirs.context():
            results = sides.results_of(theirs)
        found["differs"] = sides.difference(sides.results_of(ours, poison=True), results)
        if options.accuracy:
            found["results"] = results
    except (RuntimeError, ImportError) as error:  # PyTorch's out of memory is a RuntimeError
        found = {"error": first_line(error)}
    if theirs:
        theirs.close()
    torch.cuda.empty_cache()
    return found


# ---- Tables ----------------------------------------------------------------------------------------------------------


class Rows:
    """JSON lines in a file, where one is wanted."""

    def __init__(self, path, common):
        self.file, self.common = open(path, "a", encoding="utf-8") if path else None, common

    def add(self, case, **row):
        if not self.file:
            return
        problem = {"set": case.group, "dtype": case.dtype, "batch": case.batch, "heads_q": case.heads,
                   "heads_kv": case.heads_kv, "length": case.length, "head_dim": case.dim,
                   "mask": case.mask}  # fmt: skip
        self.file.write(json.dumps({**problem, **row, **self.common}) + "\n")
        self.file.flush()


def finite(x):
    """JSON has no NaN and no infinity: those are null."""
    return x if math.isfinite(x) else None


def print_cells(*cells):
    print("|", " | ".join(cells), "|", flush=True)


def shape(case):
    return f"{case.batch},{case.heads},{case.heads_kv},{case.length},{case.dim}"


def best_of(found, direction):
    """The name of the fused peer that has the least time, its time and ours beside it; None without one."""
    times = {name: f[direction] for name, f in found.items() if name in FUSED and direction in f}
    name = min(times, key=lambda n: times[n][1], default=None)
    return name and (name, times[name][1], times[name][0])


def print_speed(rows, options, case, direction, found):
    """One line; gives what became of the target."""
    rate = lambda ms: case.flops(direction) / ms * 1e-9
    for name, f in found.items():
        if direction in f:
            ours, theirs = f[direction]
            rows.add(case, kind="speed", **{"pass": direction}, peer=name, runs=f["runs"], ms=ours, peer_ms=theirs,
                     tflops=rate(ours), peer_tflops=rate(theirs), ratio=theirs / ours)  # fmt: skip
    best = best_of(found, direction)
    times = [f[direction][0] for f in found.values() if direction in f]
    if not times:
        print_cells(case.dtype, shape(case), case.mask, direction, *["-"] * (6 + len(options.peers)))
        return "-"
    ms = best[2] if best else times[0]
    met = "-"
    if best:
        met = gpu_cases.verdict(case, direction, best[1] / ms, rate(ms), "H200" in rows.common["machine"])
        rows.add(case, kind="best", **{"pass": direction}, peer=best[0], ms=ms, peer_ms=best[1], tflops=rate(ms),
                 ratio=best[1] / ms, ratio_asked=gpu_cases.ratio(case, direction),
                 tflops_asked=gpu_cases.rate(case, direction), met=met)  # fmt: skip
    cells = [f"{found[p][direction][1] / found[p][direction][0]:.2f}" if direction in found[p] else "-"
             for p in options.peers]  # fmt: skip
    asked = gpu_cases.ratio(case, direction)
    print_cells(case.dtype, shape(case), case.mask, direction, f"{ms:.4f}", f"{rate(ms):.0f}", *cells,
                best[0] if best else "-", f"{best[1] / ms:.2f}" if best else "-", f"{asked[0]:g}" if asked else "-",
                met)  # fmt: skip
    return met


def print_original(rows, lines):
    """The original's own table: fused against unfused, and the best fused peer beside it."""
    print("\nBoth passes, beside the plain formula in PyTorch and the best fused peer; MB beyond q, k, v and dout:\n")
    print_cells("mask", "D", "Hkv", "L", "unfused ms", "best peer ms", "flashback ms", "speed-up", "to best peer",
                "unfused MB", "least peer MB", "flashback MB")  # fmt: skip
    print_cells(*["---"] * 12)
    for case, found, ours_bytes in lines:
        best, unfused = best_of(found, "both"), found.get("unfused", {}).get("both")
        fused_bytes = [f["bytes"] for n, f in found.items() if n in FUSED and "bytes" in f]
        least = min(fused_bytes, default=None)
        mb = lambda n: f"{n * 1e-6:.1f}" if n is not None else "-"
        ours = best[2] if best else unfused[0] if unfused else None
        print_cells(case.mask, str(case.dim), str(case.heads_kv), str(case.length),
                    f"{unfused[1]:.3f}" if unfused else "-", f"{best[1]:.3f} ({best[0]})" if best else "-",
                    f"{ours:.3f}" if ours else "-", f"{unfused[1] / unfused[0]:.2f}x" if unfused else "-",
                    f"{best[1] / best[2]:.2f}x" if best else "-", mb(found.get("unfused", {}).get("bytes")), mb(least),
                    mb(ours_bytes))  # fmt: skip
        rows.add(case, kind="memory", bytes=ours_bytes, **{f"{n}_bytes": f.get("bytes") for n, f in found.items()})


def print_troubles(rows, case, found):
    """What a peer could not do, and where its results and ours are too far apart to be of the same problem; gives a
    "no" for each of the latter."""
    wrong = []
    for name, f in found.items():
        if "error" in f:
            rows.add(case, kind="refused", peer=name, error=f["error"])
            print(f"    {name}: {f['error']}", flush=True)
        elif not f["differs"] <= MOST_DIFFERENCE:
            rows.add(case, kind="differs", peer=name, difference=finite(f["differs"]))
            print(f"    WRONG: results differ from those of {name} by {f['differs']:.2g} of their size", flush=True)
            wrong.append("no")
    return wrong


def print_errors(rows, sides, case, ours, found, tensors):
    results = {"flashback": sides.results_of(ours, poison=True)}
    results |= {name: f.pop("results") for name, f in found.items() if "results" in f}
    for side, tensors_of in sides.errors(results, case, *tensors).items():
        rows.add(case, kind="accuracy", side=side, **{f"{t}_{what}": finite(value) for t, both in tensors_of.items()
                                                      for what, value in zip(("max", "rms"), both)})  # fmt: skip
        words = ", ".join(f"{t} {both[0]:.2e} / {both[1]:.2e}" for t, both in tensors_of.items())
        print(f"    {side}, largest error / root mean square: {words}", flush=True)


# ---- All -------------------------------------------------------------------------------------------------------------


def run_case(torch, sides, lib, options, rows, case, seed):
    """What was found beside each peer, and flashback's own bytes; prints the lines."""
    torch.manual_seed(seed)
    size = lambda heads: (case.batch, heads, case.length, case.dim)
    q, k, v, dout = (torch.randn(size(h), device="cuda", dtype=sides.DTYPES[case.dtype])
                     for h in (case.heads, case.heads_kv, case.heads_kv, case.heads))  # fmt: skip
    ours = sides.Flashback(lib, case, options.index, q, k, v, dout)
    wanted = [d for d in (*DIRECTIONS, "both") if re.search(options.filter, case.name(d))]
    directions = [d for d in DIRECTIONS if d in wanted or "both" in wanted]
    found = {name: measure_peer(torch, sides, options, case, name, directions, ours, (q, k, v, dout))
             for name in options.peers}  # fmt: skip
    met = [print_speed(rows, options, case, d, found) for d in wanted]
    met += print_troubles(rows, case, found)
    if options.accuracy:
        print_errors(rows, sides, case, ours, found, (q, k, v, dout))
    ours_bytes = ours.extra_bytes()
    ours.close()
    return found, ours_bytes, met


def main():
    options = read_options()
    torch = load_torch(options.index)
    import gpu_sides as sides

    lib = sides.flashback.load()
    place = describe_place(torch, lib, options)
    rows = Rows(options.jsonl, place)
    print(f"flashback {place['version']} beside PyTorch {place['torch']} (CUDA {place['torch_cuda']}, cuDNN"
          f" {place['cudnn']}) on {place['machine']}, driver {place['driver']}, {place['nvrtc']};"
          f" {options.min_time:g} s a side{', the host ahead' if options.ahead else ''}\n")  # fmt: skip
    print_cells("dtype", "B,Hq,Hkv,L,D", "mask", "pass", "ms", "TFLOP/s", *(f"to {p}" for p in options.peers),
                "best peer", "ratio", "must", "met")  # fmt: skip
    print_cells(*["---"] * (10 + len(options.peers)))
    original, verdicts = [], []
    for seed, case in enumerate(gpu_cases.cases(options.set)):
        if not any(re.search(options.filter, case.name(d)) for d in (*DIRECTIONS, "both")):
            continue
        try:
            found, ours_bytes, met = run_case(torch, sides, lib, options, rows, case, seed)
        except RuntimeError as error:
            if str(error).startswith(NO_DEVICE):
                sys.exit(f"gpu.py: {error}")
            print(f"    {case.name('both')}: {first_line(error)}", flush=True)
            rows.add(case, kind="refused", peer="flashback", error=first_line(error))
            verdicts.append("no")
            continue
        verdicts += met
        original += [(case, found, ours_bytes)] if case.group == "original" else []
    if original:
        print_original(rows, original)
    asked = [v for v in verdicts if v != "-"]
    print(f"\nSpeed: {sum(v != 'no' for v in asked)} of {len(asked)} reach what they must,"
          f" {asked.count('stretch')} of these the stretch.")  # fmt: skip


if __name__ == "__main__":
    main()
