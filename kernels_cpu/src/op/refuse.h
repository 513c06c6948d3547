#pragma once

#include <stdexcept>
#include <string>

namespace mlxinfer::cpu {

// Throws std::invalid_argument with "[operation] message".
[[noreturn]] inline void refuse(const std::string& operation, const std::string& message) {
  throw std::invalid_argument("[" + operation + "] " + message);
}

} // namespace mlxinfer::cpu
