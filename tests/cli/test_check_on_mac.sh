# tools/check-on-mac.sh: without a device it fails, with one that computes nothing too, and on the emulator all of it is
# right.
. "$(dirname "$0")/common.sh"
case ${MOCKS:-} in "" | /*) ;; *) MOCKS=$here/../../$MOCKS ;; esac

# check CODE [OPTION...]: runs the script, and keeps its report in ./report.
check() {
    code=$1
    shift
    sh "$here/../../tools/check-on-mac.sh" --program "$FLASHBACK" --quick "$@" "$PWD/report" >out 2>err </dev/null
    got=$?
    [ "$got" = "$code" ] || fail "check-on-mac.sh: exit code $got, expected $code"
}

check 1
has report "There is no plan on this machine: flashback explain: no Metal for device metal"
grep -q "## Cases" report && fail "it goes on without a device"
check 2 --fast
has err "'--fast' is no option"

[ -e "${MOCKS:-}/metal/Metal" ] || exit 0
LD_LIBRARY_PATH=$MOCKS/metal
export LD_LIBRARY_PATH
check 1
has report "| forward | f16 | 16 | 0 |"
has report "| WRONG |"
has report "**cases failed with exit code 1.**"
has report "Failed: cases tiles"

[ -e "$MOCKS/metal_model/Metal" ] || exit 0
LD_LIBRARY_PATH=$MOCKS/metal_model EMULATOR_CACHE=${EMULATOR_CACHE:-$MOCKS/emulator_cache}
export EMULATOR_CACHE
mkdir -p "$EMULATOR_CACHE"
check 0
has report "metal device 0: Mock Apple GPU 0"
has report " passed, 0 failed, "
for kernel in forward dq dkdv; do
    grep -q "^| $kernel | f16 | 16 | 0 | [0-9]* x [0-9]*, .* bytes | [0-9.]* | right |" report || fail "no tile of $kernel"
done
has report "| 1,2,1,40,40,16 | f32 | dense | bwd | unfused |"
has report "All of it ran, and all of it was right."
grep -q "WRONG" report && fail "a wrong tile"
exit 0
