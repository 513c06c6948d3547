// Reading values of a page from memory: codes of 2, 3, 4, 5, 6 or 8 bits, or values of type T kept as they are.
//
// A row of codes is a dense little-endian bit stream: value i lies in bits i*BITS .. i*BITS + BITS - 1 of the row, and the row
// begins at a word of 32 bits. A lane reads a run of N neighbouring values that begins at a byte (N is a multiple of 8, or
// N * BITS is), with the widest loads that the run's place allows, into registers, and takes them apart there.
// Every shift and every mask below is a constant of the compiled kernel.
#pragma once
#include "include/unroll.h"

// How many bits a value takes: `BITS` for codes, those of T for BITS = 16 ("kept in T", which may be float).
template <typename T, int BITS>
struct Element {
  static constexpr constant int bits = BITS == 16 ? 8 * int(sizeof(T)) : BITS;
  static constexpr constant bool quantized = BITS != 16;
};

// The widest load, in bytes, for runs of `A` bytes in rows of `B` bytes: the largest power of two that divides both, at most 16.
template <int A, int B>
struct LoadWidth {
  static constexpr constant int value = (A | B) % 16 == 0 ? 16 : (A | B) % 8 == 0 ? 8 : (A | B) % 4 == 0 ? 4 : (A | B) % 2 == 0 ? 2 : 1;
};

// Rows of a page where they lie, or in the copy that a threadgroup has made; `stride` is the distance of two rows in bytes.
struct DeviceRows {
  const device uchar* start;
  uint stride;
};

struct StagedRows {
  const threadgroup uint* start;
  uint stride;
};

// Rows of an open page: the first `kept` lie in it, the others apart from it.
struct OpenRows {
  const device uchar* page;
  const device uchar* recent;
  uint kept;
  uint stride;
};

// The same from some row on, and from some byte of each row on.
inline const device uchar* part_of(const device uchar* rows, uint row, uint offset, uint stride) { return rows + row * stride + offset; }
inline OpenRows part_of(OpenRows rows, uint row, uint offset, uint stride) {
  const uint apart = row > rows.kept ? row - rows.kept : 0;
  rows.page += offset + (row - apart) * stride;
  rows.recent += offset + apart * stride;
  rows.kept -= row - apart;
  return rows;
}

// Where a row begins.
inline const device uchar* row_of(const device uchar* rows, uint row, uint stride) { return rows + row * stride; }
inline const device uchar* row_of(OpenRows rows, uint row, uint stride) {
  return row < rows.kept ? rows.page + row * stride : rows.recent + (row - rows.kept) * stride;
}

// A run of BYTES bytes at `offset` into words. WIDTH (see LoadWidth) divides the address.
template <int BYTES, int WIDTH>
inline void load_run(DeviceRows rows, uint row, uint offset, thread uint* words) {
  const device uchar* from = rows.start + row * rows.stride + offset;
  if (WIDTH == 16) {
    UNROLL for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 x = ((const device uint4*)from)[i];
      words[4 * i] = x.x;
      words[4 * i + 1] = x.y;
      words[4 * i + 2] = x.z;
      words[4 * i + 3] = x.w;
    }
  } else if (WIDTH == 8) {
    UNROLL for (int i = 0; i < BYTES / 8; ++i) {
      const uint2 x = ((const device uint2*)from)[i];
      words[2 * i] = x.x;
      words[2 * i + 1] = x.y;
    }
  } else if (WIDTH == 4) {
    UNROLL for (int i = 0; i < BYTES / 4; ++i) words[i] = ((const device uint*)from)[i];
  } else {
    UNROLL for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
    if (WIDTH == 2) {
      UNROLL for (int i = 0; i < BYTES / 2; ++i) words[i / 2] |= uint(((const device ushort*)from)[i]) << (16 * (i % 2));
    } else {
      UNROLL for (int i = 0; i < BYTES; ++i) words[i / 4] |= uint(from[i]) << (8 * (i % 4));
    }
  }
}

template <int BYTES, int WIDTH>
inline void load_run(OpenRows rows, uint row, uint offset, thread uint* words) {
  DeviceRows one;
  one.start = row_of(rows, row, rows.stride);
  one.stride = 0;
  load_run<BYTES, WIDTH>(one, 0, offset, words);
}

// The same from threadgroup memory, by words. A run that begins inside a word is shifted into place; the word behind it is
// read only where the run reaches into it.
template <int BYTES, int WIDTH>
inline void load_run(StagedRows rows, uint row, uint offset, thread uint* words) {
  const uint at = row * rows.stride + offset;
  const threadgroup uint* from = rows.start + at / 4;
  if (WIDTH >= 4) {
    UNROLL for (int i = 0; i < BYTES / 4; ++i) words[i] = from[i];
  } else {
    const uint skip = at % 4;
    const uint last = (skip + BYTES - 1) / 4;
    UNROLL for (int i = 0; i < (BYTES + 3) / 4; ++i) {
      const uint low = from[i] >> (8 * skip);
      const bool reaches = skip > 0 && uint(i) < last;
      words[i] = reaches ? low | (from[i + 1] << (32 - 8 * skip)) : low;
    }
  }
}

// The number behind a bit pattern of type T.
template <typename T>
inline float value_of_bits(uint bits) {
  return float(as_type<T>(ushort(bits)));
}

template <>
inline float value_of_bits<float>(uint bits) {
  return as_type<float>(bits);
}

// The bits of value i of a run in registers.
template <typename T, int BITS>
inline uint bits_at(const thread uint* words, int i) {
  constexpr int bits = Element<T, BITS>::bits;
  const int first = i * bits;
  const int word = first / 32, shift = first % 32;
  uint x = words[word] >> shift;
  if (shift + bits > 32) x |= words[word + 1] << (32 - shift);
  return bits < 32 ? x & ((1u << (bits % 32)) - 1u) : x;
}

// A code minus `origin`, exactly. A float whose exponent is that of 2^23 holds an integer in its low bits: two simple operations,
// where a conversion from integers takes the time of four or more.
inline float number_of_code(uint code, int origin) {
  return as_type<float>(code | 0x4B000000u) - (8388608.0f + float(origin));
}

// Value i of a run: a code as a number, or a value of T.
template <typename T, int BITS>
inline float value_at(const thread uint* words, int i) {
  const uint x = bits_at<T, BITS>(words, i);
  return Element<T, BITS>::quantized ? number_of_code(x, 0) : value_of_bits<T>(x);
}

// Codes counted from the middle of their range. Sums of these stay small, where sums of plain codes would be large and then
// cancel against the sum of biases; the bias that goes with them is `middle_of`.
template <typename T, int BITS>
inline float centred_value_at(const thread uint* words, int i) {
  const uint x = bits_at<T, BITS>(words, i);
  return Element<T, BITS>::quantized ? number_of_code(x, 1 << (BITS - 1)) : value_of_bits<T>(x);
}

template <int BITS>
inline float middle_of(float scale, float bias) {
  return bias + scale * float(1 << (BITS - 1));
}
