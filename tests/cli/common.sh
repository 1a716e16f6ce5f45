# What the tests of the program share; read with `.`. FLASHBACK is the program; a test runs in its own folder.
set -u
here=$(cd "$(dirname "$0")" && pwd)
case $FLASHBACK in /*) ;; *) FLASHBACK=$PWD/$FLASHBACK ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
PYTHONDONTWRITEBYTECODE=1
export PYTHONDONTWRITEBYTECODE

fail() {
    echo "FAILED: $*" >&2
    echo "--- stdout" >&2
    cat out >&2
    echo "--- stderr" >&2
    cat err >&2
    exit 1
}

# expect CODE ARGUMENT...: runs the program, keeps its output in ./out and ./err.
expect() {
    code=$1
    shift
    "$FLASHBACK" "$@" >out 2>err </dev/null
    got=$?
    [ "$got" = "$code" ] || fail "flashback $*: exit code $got, expected $code"
}

# has FILE WORDS: the words are in the file as they stand.
has() {
    grep -qF -- "$2" "$1" || fail "'$2' is not in $1 (flashback $*)"
}
