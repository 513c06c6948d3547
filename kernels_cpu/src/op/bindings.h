#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

namespace mlxinfer::cpu {

namespace nb = nanobind;
using namespace nb::literals;

// One per operation, defined beside it, called by module.cpp.
void bind_packed(nb::module_& m);
void bind_weight_file(nb::module_& m);
void bind_silu_multiply(nb::module_& m);
void bind_activation(nb::module_& m);
void bind_patch_attention(nb::module_& m);
void bind_paged_attention(nb::module_& m);
void bind_rms_norm(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_argmax(nb::module_& m);
void bind_masked(nb::module_& m);
void bind_threshold(nb::module_& m);
void bind_fit(nb::module_& m);
void bind_feedback(nb::module_& m);

} // namespace mlxinfer::cpu
