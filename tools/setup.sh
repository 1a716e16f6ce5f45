#!/bin/sh
# Installs what is missing, and nothing else, through apt-get (Debian 12) and pip. Usage: tools/setup.sh group...
#     run      what building the library and the CLI needs
#     test     what the tests and `make lint` need on top
#     nvrtc    the compiler of CUDA kernels, for tests where no toolkit has brought it; it needs no GPU
#     aarch64  what the cross build for AArch64 and its tests need on top of `run`
#     peers    what bench/peers needs to make a Python with PyTorch
#     python   the same for the tests of the Python package, and what builds its wheel
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
    need 'echo "#include <cblas.h>" | gcc -E -' libopenblas-openmp-dev
    need 'command -v gnuplot' gnuplot-nox
}

probe_test() {
    need 'command -v g++' g++
    need 'command -v clang' clang
    need '[ -e "$(clang -print-resource-dir)/../../libomp.so" ]' libomp-dev
    need 'ls "$(clang -print-runtime-dir)"/libclang_rt.fuzzer*' libclang-rt-14-dev
    need 'pkg-config --exists cmocka' libcmocka-dev
    need 'command -v valgrind' valgrind
    need 'command -v cppcheck' cppcheck
    need 'command -v clang-tidy' clang-tidy
    need 'command -v clang-format' clang-format
    need 'python3 -c "import ctypes"' python3
}

# A library from a package of Python's, in a folder of its own, where tests/CMakeLists.txt looks for it.
nvrtc_root=/usr/local/lib/flashback-nvrtc
nvrtc_there="ls $nvrtc_root/nvidia/cu13/lib/libnvrtc.so.13 || PATH=\$PATH:/sbin ldconfig -p | grep 'libnvrtc\.so\.1[23]' ||
    ls /usr/local/cuda*/lib64/libnvrtc.so.1[23]"

probe_nvrtc() {
    need "$nvrtc_there" nvidia-cuda-nvrtc:pip
    need "$nvrtc_there || python3 -m pip --version" python3-pip
}

# Packages of arm64 are unpacked into a folder of their own, where cmake/aarch64.cmake looks for them. To install
# them would take arm64's libc6, in exactly the version of the machine's own.
arm64_root=/usr/local/aarch64-linux-gnu

probe_aarch64() {
    need 'command -v aarch64-linux-gnu-gcc' gcc-aarch64-linux-gnu
    need '[ -e /usr/aarch64-linux-gnu/include/stdio.h ]' libc6-dev-arm64-cross
    need 'command -v qemu-aarch64' qemu-user
    need "[ -e $arm64_root/usr/include/jansson.h ]" libjansson-dev:arm64
    need "[ -e $arm64_root/usr/lib/aarch64-linux-gnu/libjansson.so ]" libjansson4:arm64
    need "[ -e $arm64_root/usr/include/cmocka.h ]" libcmocka-dev:arm64
    need "[ -e $arm64_root/usr/lib/aarch64-linux-gnu/libcmocka.so ]" libcmocka0:arm64
}

probe_peers() {
    need 'python3 -c "import venv, ensurepip"' python3-venv
}

probe_python() {
    need 'python3 -c "import venv, ensurepip"' python3-venv
    need 'python3 -m pip --version' python3-pip
}

probe() {
    missing=""
    for group in "$@"; do
        case $group in
            run | test | nvrtc | aarch64 | peers | python) "probe_$group" ;;
            *) echo "setup: no group '$group'; there are: run test nvrtc aarch64 peers python" >&2 && exit 2 ;;
        esac
    done
}

probe "$@"
[ -z "$missing" ] && exit 0

fail() {
    echo "setup: missing:$missing (names of Debian 12 packages; those with :pip are Python's). $1" >&2
    exit 1
}

[ "$missing" = " nvidia-cuda-nvrtc:pip" ] || command -v apt-get >/dev/null 2>&1 ||
    fail "There is no apt-get here; install them by hand, then run this again."
sudo=""
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || fail "Installing them needs root, and there is no sudo."
    sudo=sudo
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck disable=SC2086 # a list of words, here and below
native=$(printf '%s\n' $missing | grep -v ':')
# shellcheck disable=SC2086
foreign=$(printf '%s\n' $missing | grep ':arm64$')

# shellcheck disable=SC2086
install_native() {
    [ -z "$native" ] && return
    $sudo apt-get update &&
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $native
}

# An apt-get of another architecture with lists of its own leaves the machine's as they are.
# shellcheck disable=SC2086
unpack_foreign() (
    [ -z "$foreign" ] && return
    cd "$scratch" && mkdir lists cache || return
    set -- -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
        -o Dir::State::status=/dev/null -o Dir::State::lists="$scratch/lists" -o Dir::Cache="$scratch/cache"
    apt-get "$@" update && apt-get "$@" download $foreign || return
    for package in *.deb; do
        $sudo dpkg-deb -x "$package" "$arm64_root" || return
    done
)

install_nvrtc() {
    case $missing in
        *nvidia-cuda-nvrtc:pip*) ;;
        *) return 0 ;;
    esac
    $sudo python3 -m pip install --no-cache-dir --target "$nvrtc_root" "nvidia-cuda-nvrtc==13.0.*"
}

echo "setup: installing$missing"
if ! { install_native && unpack_foreign && install_nvrtc; } >"$scratch/log" 2>&1; then
    tail -n 20 "$scratch/log" >&2
    fail "They could not be installed; the last words of apt-get or pip are above."
fi

probe "$@"
[ -z "$missing" ] || fail "They were installed, yet they do not work; look for other versions earlier in PATH."
