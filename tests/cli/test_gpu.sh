# What asks for a GPU says clearly that there is none. With the mock driver and the mock compiler, which compute
# nothing: devices, plans, warm, and the formats of bench. No number here is a time of anything.
. "$(dirname "$0")/common.sh"

# Without a GPU: hidden, where the machine has one.
CUDA_VISIBLE_DEVICES=-1
export CUDA_VISIBLE_DEVICES
python3 "$here/make.py" . || exit 1
for command in "bench --device cuda" "bench --device cuda --set original" "warm --dim 64" "warm --set hopper" \
    "explain --device cuda --shape 1,1,1,1,1,8" "run f32.safetensors --device cuda" "check --device cuda"; do
    expect 4 $command
    grep -q "NVIDIA driver\|CUDA" err || fail "$command does not say what is missing"
    [ "$(wc -l <err)" = 1 ] || fail "$command: more than one sentence"
    [ -s out ] && fail "$command: something on standard output"
done
expect 4 bench --device metal
has err "Metal is a part of macOS"
expect 0 check --filter 'f32.b1h2k2.q5k7.d8'
has out "0 failed"
unset CUDA_VISIBLE_DEVICES

[ -e "${MOCKS:-}/driver/libcuda.so.1" ] || exit 0

# From here on a GPU that computes nothing. MOCK_STRICT: it says at the end what was left or wrong.
mkdir temporary
TMPDIR=$PWD/temporary FLASHBACK_CACHE=$PWD/cache FLASHBACK_NVRTC=$MOCKS/nvrtc13/libnvrtc.so.13 MOCK_STRICT=1
LD_LIBRARY_PATH=$MOCKS/driver
export TMPDIR FLASHBACK_CACHE FLASHBACK_NVRTC MOCK_STRICT LD_LIBRARY_PATH

# expect, and nothing on standard error.
quietly() {
    expect 0 "$@"
    [ -s err ] && fail "flashback $*: something on standard error"
}

quietly explain --device cuda --shape 1,2,1,24,40,16
has out "device: cuda 0"
has out "gpu: Mock GPU 9.0"
expect 4 explain --device cuda --index 1 --shape 1,2,1,24,40,16
has err "it must be 0"
for name in f32 f16 bf16 blhd packed everything blocks; do
    quietly run $name.safetensors --device cuda --index 0 --repeat 2 -o out_$name.safetensors
    [ -s out_$name.safetensors ] || fail "no output of $name"
done
expect 4 run f64.safetensors --device cuda
has err "f64"
expect 1 run f32.safetensors --device cuda --verify
has err "the accuracy rule is broken"
expect 1 check --device cuda --index 0 --filter 'f32.b1h2k2.q5k7.d8'
has out "FAIL"
expect 4 check --device cuda --index 3 --filter 'f32.b1h2k2.q5k7.d8'
has err "it must be 0"
FLASHBACK_NVRTC=/nowhere
expect 4 check --device cuda --filter 'f32.b1h2k2.q5k7.d8'
has err "FLASHBACK_NVRTC"
FLASHBACK_NVRTC=$MOCKS/nvrtc13/libnvrtc.so.13

# Warm: compiled once, then from the cache; a plan afterwards compiles nothing.
rm -rf cache
quietly warm --dtype bf16 --dim 64 --dim 192,128 --causal
has out "kernel cache: $PWD/cache"
grep -q '^compiled .* forward.cu .* bf16 1,8,8,4096,4096,192,128 causal' out || fail "warm names no kernel"
grep -q '^[1-9][0-9]* compiled in .* 0 from the cache' out || fail "a new cache has kernels"
cp out first
quietly warm --dtype bf16 --dim 64 --dim 192,128 --causal
grep -q '^0 compiled in .* [1-9][0-9]* from the cache' out || fail "kernels were not kept"
[ "$(wc -l <out)" = "$(wc -l <first)" ] || fail "other kernels than at first"
quietly explain --device cuda --shape 4,8,8,2048,2048,64 --causal --dtype bf16
grep -q 'kernel: .*compiled' out && fail "warm left something to compile"
quietly warm --set original --dtype f16
has out "f16 1,32,8,2048,2048,128 causal"
quietly warm --shape 1,8,2,1,4096,128 --with forward-only
has out "f32 1,8,2,1,4096,128 dense"
expect 4 warm --dtype f64 --dim 64
has err "f64"
has out "1 problems refused"
FLASHBACK_CACHE=off
expect 4 warm --dim 64
has err "no kernel cache"
FLASHBACK_CACHE=$PWD/cache FLASHBACK_NVRTC=/nowhere
expect 4 warm --dim 64
has err "FLASHBACK_NVRTC"
FLASHBACK_NVRTC=$MOCKS/nvrtc13/libnvrtc.so.13

# Bench: what is said once, and a row for each pass and regime.
small="--device cuda --shape 1,2,1,24,40,16 --shape 2,2,2,17,17,8,24"
quietly bench $small --min-time 0
has out "Mock GPU 9.0, compute capability 9.0"
has out "from the cache on disk"
has out "  forward.cu: compiled in "
has out "Host cost of a call: forward "
has out "| 1,2,1,24,40,16 | f32 | dense | fwd | fused | 0 s |"
[ "$(grep '^|' out | tr -cd '|\n' | sort -u | wc -l)" = 1 ] || fail "a row has other columns than its head"
[ -z "$(ls -A temporary)" ] || fail "the folder of the cold cache is left"
quietly bench $small --min-time 0 --no-costs
[ "$(wc -l <out)" = 6 ] || fail "two shapes, two passes and a head are six lines"
one="--device cuda --shape 1,2,1,24,40,16" # regimes take the seconds that they say
quietly bench $one --format jsonl --regime both
cp out base.jsonl
python3 - <<'END' || fail "jsonl"
import json
lines = [json.loads(line) for line in open("base.jsonl")]
costs, rows = lines[0], lines[1:]
assert costs["kind"] == "costs" and costs["plan_cold_ms"] > 0 and costs["plan_cached_ms"] > 0, costs
assert costs["host_us_forward"] > 0 and costs["host_us_backward"] > 0, costs
assert {k["file"] for k in costs["kernels"]} >= {"forward.cu"} and all(k["cached"] for k in costs["kernels"]), costs
assert [(r["len_q"], r["regime"], r["pass"]) for r in rows] == [
    (24, g, p) for g in ("burst", "sustained") for p in ("fwd", "bwd")], rows
for row in lines:
    place = {"device": "cuda", "machine": "Mock GPU 9.0", "compute_capability": "9.0", "cuda": "13.0", "nvrtc": "13.0"}
    assert place.items() <= row.items(), row
    for key in ("host", "driver", "version", "date", "compiler"):
        assert row[key], (key, row)
for row in rows:
    assert row["isa"] == "sm_90a" and row["runs"] >= 5 and row["copies"] == 64, row
    assert row["ms_min"] <= row["ms_median"] <= row["ms_p90"] and row["host_us"] > 0, row
    assert abs(row["tflops"] * 1e3 / row["gflops"] - 1) < 1e-4 and "peak_percent" not in row, row
slow = [dict(row, ms_median=1e9) for row in rows]
for name, changed in (("slow", slow), ("regime", [dict(row, regime="other") for row in slow]),
                      ("cpu", [{k: v for k, v in row.items() if k not in ("device", "regime")} for row in slow])):
    open(name + ".jsonl", "w").write("".join(json.dumps(row) + "\n" for row in changed))
END
expect 0 bench $one --regime burst --no-costs --compare slow.jsonl
[ "$(grep -c 'burst: [1-9]' out)" = 2 ] || fail "two rows have a baseline"
for other in regime cpu; do
    expect 3 bench $one --regime burst --no-costs --compare $other.jsonl
done
quietly bench $small --min-time 0 --format csv --pass bwd --no-costs
python3 - <<'END' || fail "csv"
import csv
rows = list(csv.DictReader(open("out")))
assert len(rows) == 2 and None not in rows[0], rows
for row in rows:
    assert row["device"] == "cuda" and row["regime"] == "0 s" and row["pass"] == "bwd" and row["refused"] == "", row
    assert int(row["runs"]) >= 5 and float(row["host_us"]) > 0 and row["nvrtc"] == "13.0" and row["peak_percent"], row
END

# The sets. The unfused route is refused on a device that does not have it; the table says so.
quietly bench --device cuda --set hopper --max-len 512 --mask causal --pass fwd --min-time 0 --no-costs
[ "$(grep -c '^| 32,\(32,32\|16,16\|8,8\),512,512,\(64\|128\|256\) | bf16 | causal | fwd |' out)" = 3 ] ||
    fail "the set hopper has D 64, 128 and 256"
expect 0 bench --device cuda --set original --max-len 512 --mask dense --min-time 0
has out "| mask | D | Hkv | L | regime | unfused fwd+bwd ms | fused fwd+bwd ms | speed-up |"
[ "$(grep -c '^| dense | .* | 32 | 512 | 0 s |' out)" = 3 ] || fail "the original's table has D 64, 96 and 128"
[ "$(grep '^|' out | tr -cd '|\n' | sort -u | wc -l)" = 1 ] || fail "a row has other columns than its head"
quietly bench --device cuda --set decode --max-len 1024 --min-time 0 --no-costs
has out "| K,V GB/s |"
[ "$(tr -cd '|\n' <out | sort -u | wc -l)" = 1 ] || fail "a row of decode has other columns than its head"

# A driver that lacks a function, and a compiler that does not exist.
LD_LIBRARY_PATH=$MOCKS/driver_incomplete
expect 4 bench --device cuda
has err "has no function"
LD_LIBRARY_PATH=$MOCKS/driver FLASHBACK_NVRTC=/nowhere
expect 4 bench $small
has err "FLASHBACK_NVRTC"
[ -z "$(ls -A temporary)" ] || fail "the folder of the cold cache is left"

# Metal, on the mock of its libraries: devices, plans, warm, bench. It computes nothing either.
[ -e "$MOCKS/metal/Metal" ] || exit 0
LD_LIBRARY_PATH=$MOCKS/metal
quietly info
has out "metal device 0: Mock Apple GPU 0, family Apple9"
quietly explain --device metal --shape 1,2,1,24,40,16
has out "gpu: Mock Apple GPU 0, family Apple9; code by Metal"
for name in f32 f16 bf16 blhd packed everything blocks; do
    quietly run $name.safetensors --device metal --index 0 --repeat 2 -o out_$name.safetensors
    [ -s out_$name.safetensors ] || fail "no output of $name"
done
expect 4 run f64.safetensors --device metal
has err "f64"
expect 4 check --device metal --index 1 --filter 'f32.b1h2k2.q5k7.d8'
has err "it must be 0"
quietly warm --device metal --dtype bf16 --dim 64
grep -q '^compiled .* forward.metal .* bf16 1,8,8,4096,4096,64 dense' out || fail "warm names no kernel"
quietly bench --device metal --shape 1,2,1,24,40,16 --min-time 0
grep -q '^| 1,2,1,24,40,16 | f32 | dense | bwd | fused | .* | - | ' out || fail "no row, or one with a peak"
quietly bench --device metal --shape 1,2,1,24,40,16 --min-time 0 --format jsonl --pass fwd
python3 - <<'END' || fail "jsonl"
import json
row, = [json.loads(line) for line in open("out")]
assert row["device"] == "metal" and row["machine"] == "Mock Apple GPU 0" and row["isa"] == "Apple9", row
END
expect 2 bench --device metal --regime burst
has err "--regime is about NVIDIA GPUs"
expect 0 bench --device metal --set original --max-len 512 --mask dense --min-time 0
[ "$(grep -c '^| dense | .* | 32 | 512 |' out)" = 3 ] || fail "the original's table has D 64, 96 and 128"
