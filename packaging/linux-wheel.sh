#!/usr/bin/env bash
# A wheel for Linux with the CPU kernels, for the Python that runs it: packaging/linux-wheel.sh SDIST OUT
# MLX's own wheels need glibc 2.35, which none of the manylinux images that cibuildwheel has for x86-64 brings (they end at 2.34), so this
# runs on a system with glibc 2.35, such as Ubuntu 22.04, as MLX's own wheels are made. PYTHON needs pip and auditwheel (with patchelf).
set -euo pipefail
sdist=$(realpath "$1") out=$2 python=${PYTHON:-python3}
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT

MLXINFER_CPU_KERNELS=1 MLXINFER_ALL_ISAS=1 MLXINFER_EXACT_MLX=1 "$python" -m pip wheel --no-deps --wheel-dir "$raw" "$sdist"
# The kernels use the libmlx that MLX's package brings and has loaded: a second copy of it would know nothing of the first one's arrays.
"$python" -m auditwheel repair --exclude libmlx.so --plat auto --wheel-dir "$out" "$raw"/*.whl
