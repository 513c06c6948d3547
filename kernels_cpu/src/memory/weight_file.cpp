#include "memory/weight_file.h"

#include <cerrno>
#include <system_error>

#include <sys/mman.h>
#include <sys/stat.h>

namespace mlxinfer::cpu {

WeightFile::WeightFile(int descriptor) {
  struct stat found {};
  if (fstat(descriptor, &found) != 0) {
    throw std::system_error(errno, std::generic_category(), "fstat");
  }
  size_ = static_cast<size_t>(found.st_size);
  void* mapped = size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (mapped == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mmap");
  }
  memory_ = static_cast<char*>(mapped);
}

WeightFile::~WeightFile() {
  if (memory_ != nullptr) {
    munmap(memory_, size_);
  }
}

} // namespace mlxinfer::cpu
