#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mlxinfer::cpu {

// Threads that compute, the calling one included. Fixed at the first use.
int thread_count();

namespace detail {
using Body = void (*)(void* context, size_t begin, size_t end);
void run_parallel(size_t count, size_t grain, Body body, void* context);
} // namespace detail

// Calls `body(begin, end)` over [0, count) in pieces of `grain`, on this thread and on the workers; returns when all are done.
// Pieces are taken in order by whoever is free. Everything runs here where one piece suffices, inside another
// `parallel_for`, and while another thread uses the workers. `body` must not throw.
template <typename F>
void parallel_for(size_t count, size_t grain, F&& body) {
  using Function = std::remove_reference_t<F>;
  detail::run_parallel(
      count,
      grain,
      [](void* context, size_t begin, size_t end) { (*static_cast<Function*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

} // namespace mlxinfer::cpu
