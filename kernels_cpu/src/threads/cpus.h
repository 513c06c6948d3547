#pragma once

namespace mlxinfer::cpu {

// CPUs this process may use: its affinity mask, cut down to the quota of its cgroups, at least 1.
int allowed_cpus();

// `MLXINFER_THREADS` where it is a number from 1 to 256, otherwise `allowed_cpus()`.
int wanted_threads();

} // namespace mlxinfer::cpu
