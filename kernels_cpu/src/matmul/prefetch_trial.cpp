#include "matmul/prefetch_trial.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <mutex>

namespace mlxinfer::cpu {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::array<int64_t, 5> kDistances{4096, 2048, 6144, 8192, 12288}; // bytes, the usual one first
constexpr int kSamples = 12; // of each
constexpr int64_t kLargeMatrix = int64_t{1} << 20; // bytes that a smaller cache does not keep between two steps
constexpr double kWorthwhile = 0.97; // of the usual one's time

std::atomic<bool> decided{false};
std::atomic<int64_t> chosen{kDistances[0]};
std::mutex mutex; // for what follows
int64_t matrix_bytes = 0; // only products that read as much are compared
int begun = 0;
std::array<double, kDistances.size()> fastest{};
std::array<int, kDistances.size()> samples{};

void decide() {
  const auto best = std::min_element(fastest.begin(), fastest.end());
  if (*best < kWorthwhile * fastest[0]) {
    chosen = kDistances[static_cast<size_t>(best - fastest.begin())];
  }
  decided = true;
}

} // namespace

PrefetchTrial::PrefetchTrial(int64_t bytes) : distance_(chosen) {
  if (decided || bytes < kLargeMatrix) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (matrix_bytes == 0) {
    matrix_bytes = bytes;
    fastest.fill(std::numeric_limits<double>::infinity());
  }
  if (bytes == matrix_bytes) {
    candidate_ = begun++ % static_cast<int>(kDistances.size());
    distance_ = kDistances[static_cast<size_t>(candidate_)];
    start_ = std::chrono::steady_clock::now();
  }
}

PrefetchTrial::~PrefetchTrial() {
  if (candidate_ < 0) {
    return;
  }
  const double seconds = Seconds(std::chrono::steady_clock::now() - start_).count();
  std::lock_guard<std::mutex> lock(mutex);
  const auto i = static_cast<size_t>(candidate_);
  fastest[i] = std::min(fastest[i], seconds);
  ++samples[i];
  if (!decided && *std::min_element(samples.begin(), samples.end()) >= kSamples) {
    decide();
  }
}

} // namespace mlxinfer::cpu
