#!/usr/bin/env bash
# Builds and runs what a test would take too long for: check.sh [PART...], all parts by default, in build/check-*/.
#   thread    checks of threads and kernels (tests/kernels_cpu/native) under ThreadSanitizer
#   address   the same under AddressSanitizer and UBSan
#   module    tests/kernels_cpu with the Python module under AddressSanitizer and UBSan
#   arm64     the checks for arm64 in qemu: Debian's g++-aarch64-linux-gnu and qemu-user; without them it says so and goes on
# Needs Linux, g++ and cmake; `module` also PYTHON (default python3) with mlx, nanobind and the extra `test`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
export CXX=${CXX:-g++} MLXINFER_THREADS=${MLXINFER_THREADS:-4}
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
cmake=$(command -v cmake || echo "$(dirname "$(command -v "$PYTHON")")/cmake")

build() { # folder, then options of cmake
  "$cmake" -S kernels_cpu -B "build/$1" "${@:2}" >/dev/null
  "$cmake" --build "build/$1" --parallel "$(nproc)" | grep -v "Building\|Built\|Linking\|ninja: no work" || true
}

levels() { # every instruction set: those that this machine lacks become its best one
  for isa in portable avx2 avx512; do
    MLXINFER_CPU_ISA=$isa "$@"
  done
}

check_thread() {
  build check-thread -DMLXINFER_CHECKS=ON -DMLXINFER_SANITIZE=thread
  build/check-thread/checks 5 no-fork
}

check_address() {
  build check-address -DMLXINFER_CHECKS=ON -DMLXINFER_SANITIZE=address,undefined
  levels build/check-address/checks
}

# In a copy of the tree, so that the module in use stays as it is.
check_module() {
  local tree=build/check-module/tree
  mkdir -p "$tree"
  cp -RLf mlxinfer tests pyproject.toml "$tree"
  rm -f "$tree"/mlxinfer/kernels_cpu/_native*
  build check-module/native -DMLXINFER_SANITIZE=address,undefined -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
    -DMLXINFER_OUTPUT="$PWD/$tree/mlxinfer/kernels_cpu"
  "$PYTHON" -c 'import importlib.metadata, json; print(json.dumps({"mlx": importlib.metadata.version("mlx")}))' \
    >"$tree/mlxinfer/kernels_cpu/_native.json"
  local preload
  preload="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libstdc++.so)"
  cd "$tree"
  for isa in portable avx2 avx512; do
    MLXINFER_CPU_ISA=$isa LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 \
      "$PYTHON" -m pytest -q -p no:cacheprovider --durations=0 --durations-min=30 tests/kernels_cpu
  done
}

check_arm64() {
  if ! command -v aarch64-linux-gnu-g++ qemu-aarch64 >/dev/null; then
    echo "arm64: left out, as there is no aarch64-linux-gnu-g++ or no qemu-aarch64"
    return
  fi
  CXX=aarch64-linux-gnu-g++ build check-arm64 -DMLXINFER_CHECKS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
  for cpu in cortex-a53 neoverse-n1 max; do # nothing, dotprod, i8mm
    qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$cpu" build/check-arm64/checks 1 no-fork
  done
}

[ $# -gt 0 ] || set -- thread address module arm64
for part; do
  echo "== $part"
  ("check_$part")
done
