#!/bin/sh
# Installs what is missing, and nothing else, through apt-get (Debian 12). Usage: tools/setup.sh group...
#     run    what building the library and the CLI needs
#     test   what the tests and `make lint` need on top
set -u

missing=""
# need PROBE PACKAGE: when the probe fails, the package is missing.
need() {
    sh -c "$1" >/dev/null 2>&1 || missing="$missing $2"
}

# Any cmake will do that runs and is new enough, wherever it comes from.
cmake_works='v=$(cmake --version | sed -n "s/^cmake version //p"); [ "$(printf "3.22\n%s\n" "$v" | sort -V | head -n 1)" = 3.22 ]'

probe_run() {
    need 'command -v gcc' gcc
    need '[ -e "$(gcc -print-file-name=crt1.o)" ] && [ -e /usr/include/stdio.h ]' libc6-dev
    need "$cmake_works" cmake
    need 'ninja --version' ninja-build
    need 'command -v pkg-config' pkg-config
    need 'pkg-config --exists jansson' libjansson-dev
}

probe_test() {
    need 'command -v g++' g++
    need 'command -v clang' clang
    need '[ -e "$(clang -print-resource-dir)/../../libomp.so" ]' libomp-dev
    need 'ls "$(clang -print-runtime-dir)"/libclang_rt.fuzzer*' libclang-rt-14-dev
    need 'pkg-config --exists cmocka' libcmocka-dev
    need 'command -v gnuplot' gnuplot-nox
    need 'command -v valgrind' valgrind
    need 'command -v cppcheck' cppcheck
    need 'command -v clang-tidy' clang-tidy
    need 'command -v clang-format' clang-format
    need 'python3 -c "import ctypes"' python3
}

probe() {
    missing=""
    for group in "$@"; do
        case $group in
            run | test) "probe_$group" ;;
            *) echo "setup: no group '$group'; there are: run test" >&2 && exit 2 ;;
        esac
    done
}

probe "$@"
[ -z "$missing" ] && exit 0

fail() {
    echo "setup: missing:$missing (names of Debian 12 packages). $1" >&2
    exit 1
}

command -v apt-get >/dev/null 2>&1 || fail "There is no apt-get here; install them by hand, then run this again."
sudo=""
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || fail "Installing them needs root, and there is no sudo."
    sudo=sudo
fi

echo "setup: installing$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086 # a list of words
if ! { $sudo apt-get update &&
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "apt-get could not install them; its last words are above."
fi

probe "$@"
[ -z "$missing" ] || fail "apt-get installed them, yet they do not work; look for other versions earlier in PATH."
