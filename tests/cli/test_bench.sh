# Formats, comparison and plot of bench. Nothing here depends on how fast the machine is.
. "$(dirname "$0")/common.sh"

small="--shape 1,2,1,24,40,16 --shape 2,2,2,17,17,8,24 --min-time 0 --threads 1"

expect 0 bench $small
[ "$(wc -l <out)" = 6 ] || fail "two shapes, two passes and a head are six lines"
has out "| 1,2,1,24,40,16 | f32 | dense | fwd |"
has out "| 2,2,2,17,17,8,24 | f32 | dense | bwd |"
[ -s err ] && fail "a progress bar without a terminal"

expect 0 bench $small --format csv --causal --dtype bf16 --route unfused --pass bwd
python3 - <<'END' || fail "csv"
import csv
rows = list(csv.DictReader(open("out")))
assert len(rows) == 2, rows
for row in rows:
    assert row["mask"] == "causal" and row["dtype"] == "bf16" and row["pass"] == "bwd", row
    assert row["route"] == "unfused" and row["threads"] == "1" and row["refused"] == "", row
    assert 0 < float(row["ms_min"]) <= float(row["ms_median"]) <= float(row["ms_p90"]), row
    assert float(row["gflops"]) > 0 and int(row["peak_extra_bytes"]) > 0 and row["kv_gb_per_s"] == "", row
    assert row["machine"] and row["date"], row
END

expect 0 bench $small --format jsonl --window 3,0
cp out base.jsonl
python3 - <<'END' || fail "jsonl"
import json
rows = [json.loads(line) for line in open("base.jsonl")]
assert len(rows) == 4, rows
for row in rows:
    for key in ("machine", "isa", "threads", "version", "compiler", "date", "route", "peak_gflops"):
        assert row[key], (key, row)
    assert row["mask"] == "window 3:0" and row["route_asked"] == "auto", row
    # Operations by hand: cells of the window, 2 a multiply-add.
    cells = sum(min(row["len_k"] - 1, p) - max(0, p - 3) + 1
                for p in (i + row["len_k"] - row["len_q"] for i in range(row["len_q"])))
    D, Dv = row["head_dim"], row["head_dim_v"]
    each = D + Dv if row["pass"] == "fwd" else 3 * D + 2 * Dv
    work = 2 * row["batch"] * row["heads_q"] * cells * each
    assert abs(work / row["ms_median"] * 1e-6 / row["gflops"] - 1) < 1e-3, row
slow = [dict(row, ms_median=1e9) for row in rows]
fast = [dict(row, ms_median=1e-9) for row in rows]
other = [dict(row, mask="dense") for row in rows]
for name, changed in (("slow", slow), ("fast", fast), ("mixed", slow[:3] + fast[3:]), ("other", other),
                      ("part", slow[:1])):
    open(name + ".jsonl", "w").write("".join(json.dumps(row) + "\n" for row in changed))
open("broken.jsonl", "w").write("{}\nnot json\n")
END
compare="$small --window 3,0 --compare"
expect 0 bench $compare slow.jsonl
expect 1 bench $compare fast.jsonl
has out "SLOWER"
expect 1 bench $compare mixed.jsonl
[ "$(grep -c SLOWER out)" = 1 ] || fail "one row of four is slower"
expect 0 bench $compare part.jsonl
[ "$(grep -c 'no baseline' out)" = 3 ] || fail "three rows have no baseline"
expect 3 bench $compare other.jsonl
has err "none of these rows"
expect 3 bench $compare broken.jsonl
has err "line 2"
expect 3 bench $compare nothing.jsonl
expect 1 bench $compare fast.jsonl --format jsonl
has err "SLOWER"
python3 -c 'import json; [json.loads(line) for line in open("out")]' || fail "the comparison is in the jsonl"

# The unfused route is refused where its score matrices are too large: the row says so.
export FLASHBACK_SCORE_BYTES_MAX=1000
expect 0 bench $small --route unfused
unset FLASHBACK_SCORE_BYTES_MAX
has out "refused:"

expect 0 bench --set quick --min-time 0 --mask causal --max-len 256
[ "$(wc -l <out)" = 6 ] || fail "the set quick has two causal shapes"
expect 2 bench --set quick --max-len 16
has err "--max-len 16"

# Decode: the forward only, with what of K and V passes in a second beside what the machine reads.
expect 0 bench --set decode --max-len 1024 --min-time 0
[ "$(wc -l <out)" = 6 ] || fail "the set decode has four shapes of 1024 keys"
has out "| K,V GB/s | % of read |"
has out "| 1,32,8,8,1024,128 | f32 | dense | fwd | vector |"
[ "$(tr -cd '|\n' <out | sort -u | wc -l)" = 1 ] || fail "a row of decode has other columns than its head"
for format in jsonl csv; do
    expect 0 bench --set decode --max-len 1024 --min-time 0 --dtype bf16 --format $format
    python3 - $format <<'END' || fail "decode as $format"
import csv, json, sys
rows = [json.loads(line) for line in open("out")] if sys.argv[1] == "jsonl" else list(csv.DictReader(open("out")))
assert [int(row["len_q"]) for row in rows] == [1, 2, 4, 8], rows
for row in rows:
    kv = 2 * 2 * int(row["heads_kv"]) * int(row["len_k"]) * int(row["head_dim"])
    assert abs(kv / float(row["ms_median"]) * 1e-6 / float(row["kv_gb_per_s"]) - 1) < 1e-2, row
    assert float(row["read_gb_per_s"]) > 0 and row["machine"], row
    if sys.argv[1] == "jsonl":
        assert abs(100 * row["kv_gb_per_s"] / row["read_gb_per_s"] / row["read_percent"] - 1) < 1e-3, row
END
done
expect 2 bench --set decode --pass bwd
has err "--pass bwd"

expect 0 bench --set small --max-len 16 --min-time 0
[ "$(grep -c '^| \(32\|128\),8,8,16,16,64 | f32 | \(causal\|dense\) | \(fwd\|bwd\) |' out)" = 8 ] ||
    fail "the set small has 256 and 1024 heads, both masks, both passes"

expect 0 bench --set original --max-len 512 --min-time 0 --mask causal --dtype f32
has out "| mask | D | Hkv | L | unfused fwd+bwd ms | fused fwd+bwd ms | speed-up |"
has out "| speed-up | unfused peak MB | fused peak MB |"
[ "$(grep -c '^| causal | .* | 32 | 512 |' out)" = 3 ] || fail "the original's table has D 64, 96 and 128"

if command -v gnuplot >/dev/null 2>&1; then
    expect 0 bench $small --plot picture.svg
    has picture.svg "<svg"
    has picture.svg "GFLOP/s"
    expect 0 bench $small --plot picture.png
    [ -s picture.png ] || fail "picture.png is empty"
    expect 5 bench $small --plot missing/picture.svg
else
    expect 2 bench $small --plot picture.svg
    has err "gnuplot"
fi
