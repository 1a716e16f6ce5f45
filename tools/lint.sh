#!/bin/sh
# Format, clang-tidy and cppcheck over all C files; the first thing found ends it. Usage: tools/lint.sh [--fix]
#     --fix   format the files, and nothing else
set -eu
cd "$(dirname "$0")/.."

c_files() {
    for folder in include src harness cli bench examples tests; do
        [ ! -d "$folder" ] || find "$folder" -name '*.[ch]' -o -name '*.inc'
    done
}

if [ "${1:-}" = --fix ]; then
    for pass in 1 2 3 4 5; do # version 14 takes a line of a macro a pass
        c_files | xargs clang-format --dry-run -Werror 2>/dev/null && exit
        c_files | xargs clang-format -i
    done
    exit
fi

echo "lint: clang-format"
c_files | xargs clang-format --dry-run -Werror

echo "lint: clang-tidy"
cmake --preset ci-clang >/dev/null
# Only what the build compiles: kernels of other architectures have no flags here. Not the tests, as it does not see
# that a failed assertion of cmocka ends them, nor examples, whose main returns on an error without cleaning up, nor
# what a build makes. One file at a time: version 14 takes va_start for missing in the second file of a run.
sed -n 's/^ *"file": "\(.*\)",*$/\1/p' build/ci-clang/compile_commands.json | grep -v "^$PWD/\(tests\|examples\|build\)/" | sort -u |
    xargs -P "$(nproc)" -n 1 clang-tidy --quiet -p build/ci-clang 2>/dev/null

echo "lint: cppcheck"
# uninitvar takes &x for a use of x; invalidPointerCast objects to scratch memory cut from one block, objectIndex to
# the lanes of a vector.
cppcheck --quiet --std=c11 --enable=warning,performance,portability --suppress=uninitvar \
    --suppress=invalidPointerCast --suppress=objectIndex --inline-suppr --error-exitcode=1 \
    -j "$(nproc)" -I include -I . -I src -D_GNU_SOURCE include src harness cli

echo "lint: nothing found"
