#pragma once

#include <cstddef>
#include <memory>

namespace mlxinfer::cpu {

// A file that holds packed weights as memory does (op.h, array_in): mapped, so that its pages are the system's file cache, shared by all
// processes and given back when they are needed elsewhere. It must never be shortened; to replace it, rename another one over it.
class WeightFile : public std::enable_shared_from_this<WeightFile> {
 public:
  explicit WeightFile(int descriptor); // stays the caller's; throws std::system_error
  ~WeightFile();
  WeightFile(const WeightFile&) = delete;
  WeightFile& operator=(const WeightFile&) = delete;

  size_t size() const {
    return size_;
  }
  const char* memory() const {
    return memory_;
  }

 private:
  size_t size_ = 0;
  char* memory_ = nullptr;
};

} // namespace mlxinfer::cpu
