// The Metal shading language for a CPU: included before every kernel that the emulator compiles.
#pragma once
#include "types.h"
#include "vectors.h"
#include "math.h"
#include "integer.h"
#include "simd.h"
#include "matrix.h"
#include "atomic.h"
#include "mlx.h"
using namespace metal;
#include "constructors.h"
