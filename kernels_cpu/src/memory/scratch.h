#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace mlxinfer::cpu {

// Memory that grows and stays, 64-byte aligned: for a thread, from call to call. What was there before is lost when it is taken again.
class Scratch {
 public:
  uint8_t* take(size_t bytes) {
    if (bytes > size_) {
      size_ = bytes + bytes / 4;
      memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (size_ + 63) / 64 * 64)));
    }
    return memory_.get();
  }
  float* floats(int64_t count) {
    return reinterpret_cast<float*>(take(static_cast<size_t>(count) * sizeof(float)));
  }

 private:
  struct Free {
    void operator()(void* p) const {
      std::free(p);
    }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  size_t size_ = 0;
};

} // namespace mlxinfer::cpu
