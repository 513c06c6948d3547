// Packed matrices that lie in a file.

#include <cerrno>
#include <memory>
#include <system_error>

#include <nanobind/stl/shared_ptr.h>

#include "matmul/gguf.h"
#include "memory/huge_pages.h"
#include "memory/weight_file.h"
#include "op/bindings.h"
#include "op/op.h"

namespace mlxinfer::cpu {
namespace {

std::shared_ptr<WeightFile> map_weights(int descriptor) {
  try {
    return std::make_shared<WeightFile>(descriptor);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

nb::object gguf_in(const std::shared_ptr<WeightFile>& file, size_t offset, const std::string& name, const std::vector<int>& shape) {
  const GgufType* type = find_gguf_type(name);
  if (type == nullptr || shape.size() < 2 || shape.back() % type->columns != 0) {
    refuse("pack", "there are no matrices " + shape_text(mx::Shape(shape.begin(), shape.end())) + " of " + name + " blocks.");
  }
  const Layout layout = type->layout(shape[shape.size() - 2], shape.back());
  mx::Shape packed(shape.begin(), shape.end() - 2);
  packed.push_back(static_cast<int>(layout.panels()));
  packed.push_back(static_cast<int>(layout.panel_bytes()));
  return nb::make_tuple(array_in(file, offset, packed, mx::uint8), layout);
}

} // namespace

void bind_weight_file(nb::module_& m) {
  nb::class_<WeightFile>(m, "WeightFile").def_prop_ro("size", &WeightFile::size);
  m.def("map_weights", &map_weights, "descriptor"_a);
  m.def("into_huge_pages", [](const std::shared_ptr<WeightFile>& file, size_t from) {
    nb::gil_scoped_release release;
    return into_huge_pages(file->memory(), file->size(), from);
  }, "file"_a, "from"_a);
  m.attr("packed_version") = kPackedVersion;
  m.def("can_map_weights", &can_map_weights);
  m.def("gguf_in", &gguf_in, "file"_a, "offset"_a, "kind"_a, "shape"_a);
}

} // namespace mlxinfer::cpu
