#pragma once

#include <stdint.h>

namespace mlxinfer::cpu {

constexpr int kPageTokens = 64;

// What the numbers of a page are, in tables of kernels: float32, bfloat16, float16 (as in op/rows.h), or codes of so many bits, value i
// of a row in its bits i * bits and up, from the lowest of each byte.
constexpr int kForms = 9;
constexpr int kFormBits[kForms] = {32, 16, 16, 2, 3, 4, 5, 6, 8};

// -1 where there is no such form.
constexpr int form_of_bits(int bits) {
  for (int form = 3; form < kForms; ++form) {
    if (kFormBits[form] == bits) {
      return form;
    }
  }
  return -1;
}

// Inlined everywhere, as kernels for some machines only call them too.
[[gnu::always_inline]] constexpr int64_t form_bytes(int form, int64_t values) { // of whole bytes
  return values * kFormBits[form] / 8;
}

// Values of a token that share a scale: the largest part of a head that has at most 64 and is a multiple of 8; 0 where there is none.
constexpr int64_t value_group(int64_t dim) {
  for (int64_t group = 64; group > 0; group -= 8) {
    if (dim % group == 0) {
      return group;
    }
  }
  return 0;
}

// How one head's page lies in memory: rows, those of sealed keys being channels, all others tokens. Codes come with float16 scales and
// then biases, `[2][rows][groups]`; a value is bias + scale * code. Each row ends with a whole 32-bit word.
struct PageForm {
  int form;
  int64_t rows, size, group; // values in a row, and in a group
  bool inset = false; // the range of codes is a little narrower than that of a group: values, but not keys

  [[gnu::always_inline]] bool has_codes() const {
    return form >= 3;
  }
  [[gnu::always_inline]] int64_t groups() const {
    return size / group;
  }
  [[gnu::always_inline]] int64_t row_bytes() const {
    return has_codes() ? (size * kFormBits[form] + 31) / 32 * 4 : form_bytes(form, size);
  }
  [[gnu::always_inline]] int64_t bytes() const {
    return rows * row_bytes();
  }
  [[gnu::always_inline]] int64_t scale_bytes() const {
    return has_codes() ? 2 * rows * groups() * 2 : 0;
  }
};

} // namespace mlxinfer::cpu
