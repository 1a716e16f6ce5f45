# explain and info say what they should, in words and in JSON.
. "$(dirname "$0")/common.sh"

expect 0 explain --shape 2,8,2,1024,1024,64 --causal --softcap 30 --dtype bf16 --threads 1
for word in "Hq=8" "Hkv=2" "bf16" "softcap 30" "causal" "route" "workspace"; do
    has out "$word"
done
expect 0 explain --shape 1,2,2,5,7,16,24 --route reference --with bias,dbias,sinks --window 4,none
for word in "reference" "bias" "sinks" "Dv=24" "window left 4"; do
    has out "$word"
done
expect 4 explain --shape 1,3,2,5,7,16
has err "heads_q"
expect 4 explain --shape 1,1,1,5,7,16 --with dbias
has err "FB_BIAS"
expect 4 explain --shape 1,1,1,5,7,16 --with bias,dbias,forward-only
has err "FB_FORWARD_ONLY"
export FLASHBACK_ROUTE=sideways
expect 4 explain --shape 1,1,1,5,7,16
unset FLASHBACK_ROUTE
has err "FLASHBACK_ROUTE"
"$FLASHBACK" explain --shape 1,1,1,5,7,16 >/dev/full 2>err
[ $? = 5 ] || fail "a full disk is exit code 5"

expect 0 info
for word in "version:" "backend: cpu" "FLASHBACK_ROUTE" "machine:" "compiler:"; do
    has out "$word"
done
grep -q "peak" out && fail "info measures without --peak"
expect 0 info --peak --json
python3 - <<'END' || fail "info --json"
import json
info = json.load(open("out"))
assert info["version"] and info["machine"] and info["compiler"] and "cpu" in info["backend"], info
peak = info["peak"]
assert peak["threads"] >= 1 and peak["loops"] in ("avx512f", "avx2+fma", "portable"), peak
for key in ("f32_gflops", "f64_gflops", "bandwidth_gb_per_s", "read_gb_per_s"):
    assert len(peak[key]) == 2 and all(x > 0 for x in peak[key]), peak
# Instructions on bf16 where the processor has them. For the tiles of AMX the system is asked as well.
flags = {word for line in open("/proc/cpuinfo") if line.startswith("flags") for word in line.split()}
vectors, tiles = peak.get("bf16_avx512bf16_gflops"), peak.get("bf16_amx_gflops")
assert bool(vectors) == ("avx512_bf16" in flags) and (not tiles or "amx_bf16" in flags), peak
assert all(len(rates) == 2 and min(rates) > 0 for rates in (vectors, tiles) if rates), peak
END
expect 0 info --peak
has out "GFLOP/s"
has out "peak read:"
