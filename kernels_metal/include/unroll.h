// Loops that have to be unrolled, and loops that must not be.
#pragma once

// Before a loop over constants whose counter indexes an array in registers: an array with an index that is not known when the kernel is
// compiled lies in memory. (Under a CPU's sanitizers that would not matter, and unrolled loops would take long to compile.)
#if defined(__METAL_VERSION__) || defined(__CUDACC__)
// A loop that is rolled would be unrolled by a compiler, until the kernel is larger than what a core keeps of it.
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#else
#define UNROLL
#define ROLLED
#endif
