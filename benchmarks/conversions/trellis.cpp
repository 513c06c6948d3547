// Decoding speed of a computed trellis code against 4-bit affine codes, matrix times vector, one thread:
//   g++ -O3 -march=native -std=c++17 trellis.cpp -o trellis && ./trellis
#include <immintrin.h>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <algorithm>

constexpr int ROWS = 4096, COLUMNS = 4096;

// 16 rows side by side in the lanes: for each column one code per row. Affine: 4-bit codes, 8 columns in one 32-bit word per row, float32
// scale and bias for 64 columns.
static void affine(const uint32_t* codes, const float* scales, const float* biases, const float* x, const float* sums, float* y) {
  const __m512i mask = _mm512_set1_epi32(15);
  for (int block = 0; block < ROWS / 16; ++block) {
    __m512 total = _mm512_setzero_ps();
    for (int group = 0; group < COLUMNS / 64; ++group) {
      __m512 a = _mm512_setzero_ps(), b = _mm512_setzero_ps();
      for (int word = 0; word < 8; ++word) {
        __m512i w = _mm512_loadu_si512(codes);
        codes += 16;
        const float* xs = x + group * 64 + word * 8;
        for (int k = 0; k < 8; k += 2) {
          a = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(w, 4 * k), mask)), _mm512_set1_ps(xs[k]), a);
          b = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(w, 4 * k + 4), mask)), _mm512_set1_ps(xs[k + 1]), b);
        }
      }
      total = _mm512_fmadd_ps(_mm512_add_ps(a, b), _mm512_loadu_ps(scales), total);
      total = _mm512_fmadd_ps(_mm512_loadu_ps(biases), _mm512_set1_ps(sums[group]), total);
      scales += 16, biases += 16;
    }
    _mm512_storeu_ps(y + 16 * block, total);
  }
}

// Affine as fast CPU kernels do it: activations in 8 bits, products of four at once (VNNI). Codes 4 bits, two columns' quads in a byte.
static void affine_vnni(const uint32_t* codes, const float* scales, const float* biases, const int32_t* x8, const float* sums, float* y) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int block = 0; block < ROWS / 16; ++block) {
    __m512 total = _mm512_setzero_ps();
    for (int group = 0; group < COLUMNS / 64; ++group) {
      __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
      for (int word = 0; word < 8; ++word) {
        __m512i w = _mm512_loadu_si512(codes);
        codes += 16;
        const int32_t* xs = x8 + group * 16 + word * 2;
        a = _mm512_dpbusd_epi32(a, _mm512_and_si512(w, mask), _mm512_set1_epi32(xs[0]));
        b = _mm512_dpbusd_epi32(b, _mm512_and_si512(_mm512_srli_epi16(w, 4), mask), _mm512_set1_epi32(xs[1]));
      }
      total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(a, b)), _mm512_loadu_ps(scales), total);
      total = _mm512_fmadd_ps(_mm512_loadu_ps(biases), _mm512_set1_ps(sums[group]), total);
      scales += 16, biases += 16;
    }
    _mm512_storeu_ps(y + 16 * block, total);
  }
}

// Trellis of BITS bits: each row is a bit string; weight k is the window of 16 bits that begins at bit k*BITS, turned into a number by one
// multiplication, one ternary operation and the sum of two halves. Rows in lanes, one word of 32 bits of each row after another.
template <int BITS, bool HALVES>
static void trellis(const uint32_t* codes, const float* scales, const float* x, const uint16_t* x16, float* y) {
  const __m512i multiplier = _mm512_set1_epi32(0x4be04a65), keep = _mm512_set1_epi32(int(0x8fff8fff)), bias = _mm512_set1_epi32(0x3b603b60);
  const __m512i low = _mm512_set1_epi32(0xffff);
  constexpr int WORDS = COLUMNS * BITS / 32;
  for (int block = 0; block < ROWS / 16; ++block) {
    const uint32_t* at = codes + size_t(block) * (WORDS + 1) * 16;
    __m512 a = _mm512_setzero_ps(), b = _mm512_setzero_ps();
    __m512h ha = _mm512_setzero_ph();
    __m512i first = _mm512_loadu_si512(at), next = first;
    for (int chunk = 0; chunk < COLUMNS / 32; ++chunk) {
      if constexpr (HALVES) ha = _mm512_setzero_ph();
#pragma GCC unroll 32
      for (int k = 0; k < 32; ++k) {
        constexpr int B = BITS;
        const int bit = k * B, word = bit / 32, shift = bit % 32;
        if (shift < B || k == 0) {
          if (k) first = next;
          next = _mm512_loadu_si512(at + 16 * (chunk * B + word + 1));
        }
        __m512i window = shift == 0 ? first : _mm512_shrdi_epi32(first, next, shift);
        window = _mm512_and_si512(window, low);
        __m512i v = _mm512_mullo_epi32(window, multiplier);
        v = _mm512_ternarylogic_epi32(v, keep, bias, 0x6a);
        if constexpr (HALVES) {
          ha = _mm512_fmadd_ph(_mm512_castsi512_ph(v), _mm512_castsi512_ph(_mm512_set1_epi32(x16[chunk * 32 + k] * 0x10001)), ha);
        } else {
          __m512 p = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)), q = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
          a = _mm512_fmadd_ps(p, _mm512_set1_ps(x[chunk * 32 + k]), a);
          b = _mm512_fmadd_ps(q, _mm512_set1_ps(x[chunk * 32 + k]), b);
        }
      }
      first = next;
      if constexpr (HALVES) {
        __m512i v = _mm512_castph_si512(ha);
        a = _mm512_add_ps(a, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)));
        b = _mm512_add_ps(b, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16))));
      }
    }
    _mm512_storeu_ps(y + 16 * block, _mm512_mul_ps(_mm512_add_ps(a, b), _mm512_loadu_ps(scales + 16 * block)));
  }
}

// Only reads the bytes.
static void only_read(const uint32_t* codes, size_t words, float* y) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t i = 0; i + 64 <= words; i += 64) {
    a = _mm512_xor_si512(a, _mm512_loadu_si512(codes + i)), b = _mm512_xor_si512(b, _mm512_loadu_si512(codes + i + 16));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(codes + i + 32)), d = _mm512_xor_si512(d, _mm512_loadu_si512(codes + i + 48));
  }
  _mm512_storeu_ps(y, _mm512_castsi512_ps(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d))));
}

int main() {
  const size_t most = size_t(ROWS) * COLUMNS * 5 / 32 + ROWS * 4;
  constexpr int COPIES = 6;  // matrices in turn, more than the caches hold
  std::vector<uint32_t> codes(most * COPIES);
  for (auto& c : codes) c = uint32_t(rand()) * 2654435761u ^ uint32_t(rand());
  std::vector<float> scales(ROWS * COLUMNS / 64, 1e-3f), biases(scales), x(COLUMNS, 0.5f), sums(COLUMNS / 64, 32.f), y(ROWS);
  std::vector<uint16_t> x16(COLUMNS, 0x3800);
  std::vector<int32_t> x8(COLUMNS / 4, 0x01010101);
  struct Case { const char* name; double bits; std::vector<double> seconds; };
  Case cases[] = {{"read 4.5 bits", 4.5, {}}, {"affine 4/64, floats", 4.5, {}}, {"affine 4/64, 8-bit inputs", 4.5, {}},
                  {"trellis 3 bits, floats", 3, {}}, {"trellis 4 bits, floats", 4, {}}, {"trellis 3 bits, halves", 3, {}}, {"trellis 4 bits, halves", 4, {}}};
  for (int round = 0; round < 24; ++round)
    for (int n = 0; n < 7; ++n) {
      const uint32_t* c = codes.data() + most * (round % COPIES);
      auto begin = std::chrono::steady_clock::now();
      if (n == 0) only_read(c, size_t(ROWS) * COLUMNS * 9 / 64, y.data());
      if (n == 1) affine(c, scales.data(), biases.data(), x.data(), sums.data(), y.data());
      if (n == 2) affine_vnni(c, scales.data(), biases.data(), x8.data(), sums.data(), y.data());
      if (n == 3) trellis<3, false>(c, scales.data(), x.data(), x16.data(), y.data());
      if (n == 4) trellis<4, false>(c, scales.data(), x.data(), x16.data(), y.data());
      if (n == 5) trellis<3, true>(c, scales.data(), x.data(), x16.data(), y.data());
      if (n == 6) trellis<4, true>(c, scales.data(), x.data(), x16.data(), y.data());
      cases[n].seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
  for (auto& each : cases) {
    std::sort(each.seconds.begin(), each.seconds.end());
    double s = each.seconds[each.seconds.size() / 4], weights = double(ROWS) * COLUMNS;
    printf("%-26s %6.2f ms  %6.2f weights/ns  %6.2f GB/s\n", each.name, s * 1e3, weights / s / 1e9, weights * each.bits / 8 / s / 1e9);
  }
}
