#pragma once

#include <chrono>
#include <cstdint>

namespace mlxinfer::cpu {

// How long before it is read memory is prefetched in a product of one row, which waits for memory. The first such products of a process with
// a large matrix try several distances in turn; the fastest one is kept. Results do not depend on it.
class PrefetchTrial {
 public:
  // For a product that reads `bytes` of weights with one row.
  explicit PrefetchTrial(int64_t bytes);
  ~PrefetchTrial();
  PrefetchTrial(const PrefetchTrial&) = delete;
  PrefetchTrial& operator=(const PrefetchTrial&) = delete;

  int64_t distance() const {
    return distance_;
  }

 private:
  int64_t distance_; // bytes
  int candidate_ = -1; // that this product tries, or -1
  std::chrono::steady_clock::time_point start_;
};

} // namespace mlxinfer::cpu
