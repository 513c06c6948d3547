#include "dispatch/isa.h"
#include "memory/slabs.h"
#include "op/bindings.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false); // arrays still referenced when the interpreter ends are no leak of ours
  m.def("isa_name", &isa_name);
  m.def("machine_isa", &machine_isa);
  m.def("compiled_isas", [] {
    std::vector<std::string> names;
    for (Level each : {Level::lowest, Level::middle, Level::highest}) {
      if (is_compiled(each)) {
        names.emplace_back(name_of(each));
      }
    }
    return names;
  });
  m.def("thread_count", &thread_count);
  m.def("reserve_weight_memory", &reserve_weight_memory);
  m.def("release_weight_memory", &release_weight_memory);
  bind_packed(m);
  bind_weight_file(m);
  bind_silu_multiply(m);
  bind_activation(m);
  bind_patch_attention(m);
  bind_paged_attention(m);
  bind_rms_norm(m);
  bind_blocks(m);
  bind_argmax(m);
  bind_masked(m);
  bind_threshold(m);
  bind_fit(m);
  bind_feedback(m);
}

} // namespace mlxinfer::cpu
