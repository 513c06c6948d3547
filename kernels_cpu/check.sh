#!/usr/bin/env bash
# Builds and runs what would take a test too long: check.sh [PART...], all parts by default, in build/check-*/.
#   thread    threads and kernels (tests/kernels_cpu/native), then the module in tests/kernels_cpu, under ThreadSanitizer
#   address   the same under AddressSanitizer and UBSan, at each instruction set
#   arm64     threads and kernels for arm64 in qemu: Debian's g++-aarch64-linux-gnu and qemu-user; without them it says so and goes on
# Needs Linux, g++, and a Python (PYTHON, default python3) with mlx, nanobind, cmake and the extra `test`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=$(realpath --no-symlinks "$(command -v "${PYTHON:-python3}")")
PATH=$(dirname "$PYTHON"):$PATH # cmake and ninja may be packages
export CXX=${CXX:-g++} MLXINFER_THREADS=${MLXINFER_THREADS:-4}

build() { # folder, then options of cmake
  cmake -S kernels_cpu -B "build/$1" "${@:2}" >"build/$1.log" 2>&1 && cmake --build "build/$1" --parallel "$(nproc)" >>"build/$1.log" 2>&1 ||
    { cat "build/$1.log" && return 1; }
}

# The module with a sanitizer, in a copy of the tree, so that the one in use stays as it is.
build_module() { # folder, sanitizers
  local tree=build/$1/tree
  rm -rf "$tree"
  mkdir -p "$tree"
  cp -RL mlxinfer tests pyproject.toml "$tree"
  rm -f "$tree"/mlxinfer/kernels_cpu/_native*
  build "$1" -DMLXINFER_SANITIZE="$2" -DPython_EXECUTABLE="$PYTHON" -DMLXINFER_OUTPUT="$PWD/$tree/mlxinfer/kernels_cpu"
  "$PYTHON" -c 'import importlib.metadata, json; print(json.dumps({"mlx": importlib.metadata.version("mlx")}))' \
    >"$tree/mlxinfer/kernels_cpu/_native.json"
}

test_module() { # folder, the sanitizer's library, then arguments of pytest
  (cd "build/$1/tree" && LD_PRELOAD="$("$CXX" -print-file-name="$2") $("$CXX" -print-file-name=libstdc++.so)" \
    "$PYTHON" -m pytest -q -p no:cacheprovider --durations=0 --durations-min=60 tests/kernels_cpu "${@:3}")
}

check_thread() {
  export TSAN_OPTIONS=halt_on_error=1
  build check-thread -DMLXINFER_CHECKS=ON -DMLXINFER_SANITIZE=thread
  build/check-thread/checks 5 no-fork
  build_module check-thread-module thread
  export TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 # Python and MLX
  test_module check-thread-module libtsan.so -k "not fork and not lower_instruction_sets"
}

check_address() {
  export UBSAN_OPTIONS=print_stacktrace=1
  build check-address -DMLXINFER_CHECKS=ON -DMLXINFER_SANITIZE=address,undefined
  build_module check-address-module address,undefined
  for isa in portable avx2 avx512; do # those that this machine lacks become its best one
    MLXINFER_CPU_ISA=$isa build/check-address/checks
    MLXINFER_CPU_ISA=$isa ASAN_OPTIONS=detect_leaks=0 test_module check-address-module libasan.so
  done
}

check_arm64() {
  if ! command -v aarch64-linux-gnu-g++ >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
    echo "arm64: left out, as there is no aarch64-linux-gnu-g++ or no qemu-aarch64"
    return
  fi
  CXX=aarch64-linux-gnu-g++ build check-arm64 -DMLXINFER_CHECKS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
  for cpu in cortex-a53 neoverse-n1 max; do # nothing, dotprod, i8mm
    qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$cpu" build/check-arm64/checks 1 no-fork
  done
}

mkdir -p build
[ $# -gt 0 ] || set -- thread address arm64
for part; do
  case $part in thread | address | arm64) ;; *) echo "check.sh: there is no part $part, only thread, address and arm64" >&2; exit 2 ;; esac
done
for part; do
  echo "== $part"
  "check_$part"
done
