// One row of x times rows of a quantized matrix.
//
// A simdgroup takes four rows of the matrix, for which it loads, converts and adds up its numbers of x once. A lane takes a run of numbers,
// 16 bytes of 4-bit or 8-bit codes, and neighbouring lanes neighbouring runs. Simdgroups that share four rows divide K among themselves.
//
// Codes are not converted. In the low byte of a half, a code is a subnormal number: code * 2^-24, exactly, which a multiply-add in float32
// takes as it is. So one `and` leaves two numbers of a word; x is divided beforehand by the power of two at which a code lies in its byte.
#pragma once

constant constexpr int kRows = 4;
constant constexpr int kMostParts = 8;  // simdgroups of a threadgroup

// What a simdgroup computes.
struct Part {
  int row;            // of the matrix: the first of four, or of two and two that gate them
  int rows;           // of the matrix, or of its first half
  bool gated;
  int first, step, runs;  // of a row: a lane's first run, the distance of the next, and how many there are
};

// Row `index` of four, or the last one there is: what is computed for it is not stored.
inline int row_of_part(Part part, int index) {
  return part.gated ? min(part.row + index % 2, part.rows - 1) + index / 2 * part.rows : min(part.row + index, part.rows - 1);
}

// Sizes of a run of codes.
template <int BITS>
struct Run {
  static constexpr constant int numbers = BITS == 8 ? 16 : 32;
  static constexpr constant int words = numbers * BITS / 32;
  static constexpr constant int in_byte = 8 % BITS == 0 ? 8 / BITS : 1;  // codes; 1 if they cross bytes
};

template <int NUMBERS, typename T>
inline void load_numbers(const device T* from, thread float* numbers) {
  constexpr int bytes = 8 * int(sizeof(T));
  UNROLL for (int octet = 0; octet < NUMBERS / 8; ++octet) {
    uint words[2 * sizeof(T)];
    const DeviceRows rows = {(const device uchar*)(from + 8 * octet), 0};
    load_run<bytes, 16>(rows, 0, 0, words);
    UNROLL for (int i = 0; i < 8; ++i) numbers[8 * octet + i] = value_at<T, 16>(words, i);
  }
}

// Two numbers of a word, each in the low bits of its half, times two of x.
inline float with_pair(uint word, float low, float high, float sum) {
  const half2 pair = as_type<half2>(word);
  return fma(float(pair.y), high, fma(float(pair.x), low, sum));
}

// Sum of a run's codes times x, times 2^-24. Codes that cross bytes are taken out of their words one by one.
template <int BITS>
inline float times_codes(thread const uint* words, thread const float* x) {
  constexpr int in_byte = Run<BITS>::in_byte, in_half = 2 * in_byte;
  float sum = 0.0f;
  if (8 % BITS == 0) {
    UNROLL for (int word = 0; word < Run<BITS>::words; ++word) {
      UNROLL for (int i = 0; i < in_half; ++i) {
        const uint mask = ((1u << BITS) - 1u) * 0x00010001u << (i % in_byte * BITS);
        const int at = 2 * in_half * word + i;
        sum = with_pair((i < in_byte ? words[word] : words[word] >> 8) & mask, x[at], x[at + in_half], sum);
      }
    }
  } else {
    UNROLL for (int i = 0; i < Run<BITS>::numbers; ++i) sum = fma(float(as_type<half>(ushort(bits_at<half, BITS>(words, i)))), x[i], sum);
  }
  return sum;
}

// The same of mxfp4, times 2^-14: sign, exponent and fraction of a code are put where a half has them.
inline float times_small_floats(thread const uint* words, thread const float* x) {
  float sum = 0.0f;
  UNROLL for (int word = 0; word < 4; ++word) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const uint top = words[word] << (12 - 4 * i);
      sum = with_pair((top & 0x80008000u) | (top >> 3 & 0x0E000E00u), x[8 * word + i], x[8 * word + 4 + i], sum);
    }
  }
  return sum;
}

// Sums of the lane for four rows of affine codes.
template <typename T, int BITS, int GROUP>
inline void multiply_run(thread const AffineCodes<T, BITS, GROUP>& m, const device T* x, Part part, int run, thread float* sums) {
  constexpr int numbers = Run<BITS>::numbers, words = Run<BITS>::words, in_byte = Run<BITS>::in_byte;
  const DeviceRows rows = {m.codes, uint(m.columns / 8 * BITS)};
  uint codes[kRows * words];
  float scales[kRows], biases[kRows], own[numbers], sum = 0.0f;
  UNROLL for (int r = 0; r < kRows; ++r) {
    const int row = row_of_part(part, r), group = row * (m.columns / GROUP) + run / (GROUP / numbers);
    load_run<4 * words, LoadWidth<4 * words, 4 * words>::value>(rows, uint(row), uint(4 * words * run), codes + r * words);
    scales[r] = float(m.scales[group]);
    biases[r] = float(m.biases[group]);
  }
  load_numbers<numbers>(x + numbers * run, own);
  UNROLL for (int i = 0; i < numbers; ++i) {
    sum += own[i];
    own[i] *= 1.0f / float(1 << (i % in_byte * BITS));
  }
  UNROLL for (int r = 0; r < kRows; ++r) {
    sums[r] = fma(scales[r], 16777216.0f * times_codes<BITS>(codes + r * words, own), fma(biases[r], sum, sums[r]));
  }
}

template <typename T>
inline void multiply_run(thread const Mxfp4Codes& m, const device T* x, Part part, int run, thread float* sums) {
  float own[32];
  Mxfp4Piece pieces[kRows];
  UNROLL for (int r = 0; r < kRows; ++r) load_piece(m, row_of_part(part, r), run, pieces[r]);
  load_numbers<32>(x + 32 * run, own);
  UNROLL for (int r = 0; r < kRows; ++r) sums[r] = fma(pieces[r].scale, 16384.0f * times_small_floats(pieces[r].words, own), sums[r]);
}

// Leaves the simdgroup's part of four sums in `partial`.
template <typename T, typename M>
inline void multiply_rows(thread const M& m, const device T* x, Part part, uint lane, threadgroup float* partial) {
  float sums[kRows];
  UNROLL for (int r = 0; r < kRows; ++r) sums[r] = 0.0f;
  ROLLED for (int run = part.first; run < part.runs; run += part.step) multiply_run(m, x, part, run, sums);
  UNROLL for (int r = 0; r < kRows; ++r) {
    const float sum = simd_sum(sums[r]);
    if (lane == 0) partial[r] = sum;
  }
}

// Adds up what the simdgroups have left of row `index` of four, always in the same order.
inline float sum_of_shares(const threadgroup float* partial, int shares, int index) {
  float sum = 0.0f;
  for (int i = 0; i < shares; ++i) sum += partial[i * kRows + index];
  return sum;
}

template <typename T, int GATE>
inline void store_rows(const threadgroup float* partial, Part part, int shares, uint lane, device T* out) {
  constexpr int stored = GATE == 0 ? kRows : kRows / 2;
  const int index = int(lane);
  if (index >= stored || part.row + index >= part.rows) return;
  float number = sum_of_shares(partial, shares, index);
  if (GATE != 0) number = activated<GATE>(number) * sum_of_shares(partial, shares, index + stored);
  out[part.row + index] = T(number);
}
