#!/bin/sh
# What can only be shown on a GPU: every case by every route, the tests of tests/cuda/test_device.c, and NVIDIA's
# sanitizers over cases that touch each kernel. Usage: tools/check_gpu.sh [folder with flashback and test_device]
# Needs a driver, NVRTC, and, for the last part, compute-sanitizer. Exit code 0: nothing failed.
set -u
bin=${1:-build/ci}
[ -x "$bin/flashback" ] || bin=build/release
flashback=$bin/flashback
device_tests=$bin/tests/test_device
[ -x "$device_tests" ] || device_tests=$bin/test_device
jobs=$(nproc)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export OMP_NUM_THREADS=1
failed=0

"$flashback" info | grep -E '^(version|cuda|kernel)' || failed=1

echo "check: $jobs processes"
for i in $(seq "$jobs"); do
    "$flashback" check --device cuda --part "$i/$jobs" >"$out/part$i" 2>&1 &
done
wait
for i in $(seq "$jobs"); do # a part that crashed has no last line
    grep -q ' passed, 0 failed, ' "$out/part$i" || failed=1
done
grep -h '^FAIL' "$out"/part* | head -n 40
cat "$out"/part* | awk '/ passed, / { p += $1; f += $3; u += $5 } END { print p " passed, " f " failed, " u " unsupported" }'

if [ -x "$device_tests" ]; then
    "$device_tests" || failed=1
else
    echo "check_gpu: no test_device in $bin"
    failed=1
fi

# Both routes, both element sizes, plain and with all options, dbias, dsinks, several tiles, gaps of NaN.
cases='^(f32|bf16)[.](b2h2k1[.]q70k83[.]d16[.]block32x16bh|b2h4k2[.]q(7|70)k83[.]d40[.]causal|b1h4k1[.]q8k400[.]d64[.]causal|b5h2k1[.]q70k70[.]d16[.]causal[.]packed$|b1h2k1[.]q17k21[.]d(128|576)[.]padded)'
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck synccheck initcheck; do
        echo "compute-sanitizer: $tool"
        compute-sanitizer --tool "$tool" --error-exitcode 3 "$flashback" check --device cuda --filter "$cases" \
            >"$out/$tool" 2>&1 || { failed=1 && tail -n 30 "$out/$tool"; }
        grep -E 'ERROR SUMMARY|RACECHECK SUMMARY| passed, ' "$out/$tool"
    done
else
    echo "check_gpu: compute-sanitizer is not here; its part is left out"
fi
exit $failed
