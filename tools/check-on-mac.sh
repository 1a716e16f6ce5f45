#!/bin/sh
# What can only be shown on a Mac: every case on the GPU, the tiles of the table against each other, fused against
# unfused. Builds first, and writes one report. Usage: tools/check-on-mac.sh [OPTION]... [REPORT]
#     --program FILE   this flashback instead of a build of this tree
#     --quick          a few cases and small shapes: minutes on a Mac; on the emulator, a test of this script
# REPORT is metal-report.md unless it is named. Without a Metal device it fails, and so it does when a case fails;
# exit code 0 means that all of it ran and was right. Needs macOS 14, Apple's command line tools, cmake, pkg-config and
# jansson (brew install cmake pkgconf jansson). Keep the machine awake and idle: caffeinate -i tools/check-on-mac.sh
set -u
cd "$(dirname "$0")/.." || exit 1

program="" report=metal-report.md quick=""
while [ $# -gt 0 ]; do
    case $1 in
    --program) program=$2 && shift ;;
    --quick) quick=yes ;;
    -*) echo "check-on-mac: '$1' is no option; see the head of this script" >&2 && exit 2 ;;
    *) report=$1 ;;
    esac
    shift
done

if [ -n "$quick" ]; then
    cases='^bf16[.]b2h4k2[.]q(5|70)k70[.]d16[.]causal([.](sinks|packed|biasbhqk))?$'
    types=f16 dims=16 shape=1,2,1,40,40 seconds=0 rows=2
else
    cases=. types="f16 f32" dims="64 96 128" shape=1,32,32,2048,2048 seconds=0.5 rows=99
fi
out=$(mktemp -d) || exit 1
trap 'rm -rf "$out"' EXIT
failed=""

# say TEXT...: a line of the report, and of the terminal.
say() { printf '%s\n' "$*" | tee -a "$report"; }

# section TITLE
section() { say "" && say "## $1" && say ""; }

# step NAME COMMAND...: its output goes into the report, indented as text, tables as they are; a failure is kept in mind.
step() {
    name=$1
    shift
    "$@" >"$out/step" 2>&1
    code=$?
    sed '/^|/!s/^/    /' "$out/step" | tee -a "$report"
    [ "$code" = 0 ] && return
    failed="$failed $name"
    say "" && say "**$name failed with exit code $code.**"
}

: >"$report" || exit 1
say "# flashback on Metal"
say ""
say "Made by tools/check-on-mac.sh${quick:+ --quick} on $(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."

# ---- The build ----------------------------------------------------------------------------------------------------

# Apple's clang has no OpenMP; the processor's share is not what is looked at here.
if [ -z "$program" ]; then
    section Build
    step build sh -c 'cmake -S . -B build/mac -DCMAKE_BUILD_TYPE=Release -DFLASHBACK_OPENMP=OFF -DFLASHBACK_TESTS=OFF \
        -DFLASHBACK_TRAIN=OFF >"$0" 2>&1 && cmake --build build/mac -j 8 >>"$0" 2>&1 || { tail -n 40 "$0"; exit 1; }
        echo "built with $(grep -c warning: "$0") warnings"; grep warning: "$0" | sort | uniq -c | head -n 20; :' "$out/build"
    program=build/mac/flashback
fi

# ---- The machine --------------------------------------------------------------------------------------------------

section Machine
say "    $(uname -sm) $(sw_vers -productVersion 2>/dev/null)"
step info sh -c '"$0" info | grep -E "^(version|metal|machine|compiler)"' "$program"
if ! "$program" explain --device metal --shape 1,1,1,16,16,16 >"$out/plan" 2>&1; then
    say "" && say "**There is no plan on this machine: $(cat "$out/plan")**"
    exit 1
fi
step plan cat "$out/plan"

# ---- Cases --------------------------------------------------------------------------------------------------------

section "Cases"
say "Both passes of every case by every route against the float64 reference; unsupported are f64 and route reference."
say ""
step cases "$program" check --device metal --filter "$cases"

# ---- Tiles --------------------------------------------------------------------------------------------------------

# pass_of KERNEL: the pass that shows it.
pass_of() { [ "$1" = forward ] && echo fwd || echo bwd; }

# Rows of the table that fit, from the one that is taken on: right, and how fast? The last column has the plan's words.
sweep() { # KERNEL TYPE D
    n=0
    while [ $n -lt $rows ] && FLASHBACK_TILES=$1=$n "$program" explain --device metal --dtype "$2" --shape "$shape,$3" --causal \
        >"$out/plan" 2>/dev/null; do
        tile=$(sed -n "s/^kernel: $1.metal.*tiles \([0-9]* x [0-9]*\),.* \([0-9]* threads\), \([0-9]* bytes\).*/\1, \2, \3/p" "$out/plan")
        verdict=right
        FLASHBACK_TILES=$1=$n "$program" check --device metal --route fused \
            --filter "^$2[.]b1h2k1[.].*[.]d$3([.]causal)?$" >"$out/check" 2>&1 || {
            verdict=WRONG
            failed="$failed tiles"
        }
        ms=$(FLASHBACK_TILES=$1=$n "$program" bench --device metal --dtype "$2" --shape "$shape,$3" --causal \
            --route fused --pass "$(pass_of "$1")" --min-time $seconds --format csv | sed 1d | cut -d , -f 12)
        say "| $1 | $2 | $3 | $n | $tile | $ms | $verdict |"
        n=$((n + 1))
    done
    [ "$n" -gt 0 ] || failed="$failed tiles"
}

section "Tiles"
say "Row 0 is what plans take. Times are of the whole pass, B,Hq,Hkv,L,L = $shape, causal; the fastest belongs first in"
say "src/metal/tune.c."
say ""
say "| kernel | dtype | D | row | tile | median ms | cases |"
say "|---|---|--:|--:|---|--:|---|"
for kernel in forward dq dkdv; do
    for type in $types; do
        for dim in $dims; do
            sweep $kernel $type $dim
        done
    done
done

# ---- Fused against unfused ----------------------------------------------------------------------------------------

section "Fused against unfused"
if [ -n "$quick" ]; then
    step table sh -c 'for r in unfused fused; do "$0" bench --device metal --shape "$1" --route $r --min-time 0 || exit; done' \
        "$program" $shape,16
else
    say "The table of the original, ml-explore/mlx#3241; MB are those beside the inputs. Times include what a call costs the"
    say "host, as it returns when the GPU is done."
    say ""
    step table "$program" bench --device metal --set original --min-time $seconds
    section "Few queries"
    step short "$program" bench --device metal --set decode --min-time $seconds
fi

section "Result"
if [ -n "$failed" ]; then
    say "Failed:$failed"
    exit 1
fi
say "All of it ran, and all of it was right."
