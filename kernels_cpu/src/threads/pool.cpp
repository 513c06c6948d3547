#include "threads/pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>

#include "threads/cpus.h"

namespace mlxinfer::cpu {
namespace {

// A worker that has just finished looks out for more this long before it sleeps; within a step the next operation
// follows within microseconds, while waking a sleeping thread takes tens of them.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesPerClockReading = 32;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb" ::: "memory");
#endif
}

template <typename Done>
bool spin_until(Done done) {
  auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClockReading; ++i) {
      if (done()) {
        return true;
      }
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

thread_local bool inside = false;

// One job at a time. `ticket` holds the job's number and its next free piece: whoever advances it has read the fields of a job
// that cannot end before that piece is done, so late workers never touch a later job's fields unknowingly.
class Pool {
 public:
  explicit Pool(int threads) {
    try {
      for (; threads_ < threads; ++threads_) {
        std::thread([this] { work(); }).detach();
      }
    } catch (const std::system_error&) { // no more threads are allowed: those that there are do
    }
  }

  int threads() const {
    return threads_;
  }

  bool run(size_t count, size_t grain, size_t pieces, detail::Body body, void* context) {
    std::unique_lock<std::mutex> lock(owner_, std::try_to_lock);
    if (!lock) {
      return false;
    }
    // A late worker may hold the last job's ticket: it must not be able to take a piece with it once the fields change.
    uint32_t job = ++job_;
    ticket_.exchange(static_cast<uint64_t>(job) << 32 | UINT32_MAX, std::memory_order_acq_rel);
    count_.store(count, std::memory_order_relaxed);
    grain_.store(grain, std::memory_order_relaxed);
    pieces_.store(pieces, std::memory_order_relaxed);
    body_.store(body, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    unfinished_.store(pieces, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(job) << 32, std::memory_order_release);
    wake_workers(job);
    take_pieces();
    wait_until_finished();
    return true;
  }

 private:
  void work() {
    inside = true;
    for (uint32_t seen = 0;; take_pieces()) {
      auto is_new = [&] { return published_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(is_new)) {
        std::unique_lock<std::mutex> lock(sleep_);
        ++asleep_;
        wake_.wait(lock, is_new);
        --asleep_;
      }
      seen = published_.load(std::memory_order_acquire);
    }
  }

  void wake_workers(uint32_t job) {
    bool any = false;
    {
      std::lock_guard<std::mutex> lock(sleep_);
      published_.store(job, std::memory_order_release);
      any = asleep_ > 0;
    }
    if (any) {
      wake_.notify_all();
    }
  }

  void wait_until_finished() {
    auto is_finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
    if (!spin_until(is_finished)) {
      std::unique_lock<std::mutex> lock(sleep_);
      owner_asleep_ = true;
      finished_.wait(lock, is_finished);
      owner_asleep_ = false;
    }
  }

  void finish_piece() {
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard<std::mutex> lock(sleep_);
      if (owner_asleep_) {
        finished_.notify_one();
      }
    }
  }

  void take_pieces() {
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      size_t piece = static_cast<uint32_t>(ticket), pieces = pieces_.load(std::memory_order_relaxed);
      size_t count = count_.load(std::memory_order_relaxed), grain = grain_.load(std::memory_order_relaxed);
      auto body = body_.load(std::memory_order_relaxed);
      auto context = context_.load(std::memory_order_relaxed);
      if (piece >= pieces) {
        return;
      }
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_relaxed)) {
        continue;
      }
      size_t begin = piece * grain;
      body(context, begin, begin + grain < count ? begin + grain : count);
      finish_piece();
    }
  }

  int threads_ = 1;
  std::mutex owner_;
  uint32_t job_ = 0;
  std::atomic<size_t> count_{0}, grain_{1}, pieces_{0};
  std::atomic<detail::Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<size_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> published_{0};
  std::mutex sleep_; // for the fields below, and held while `published_` changes
  std::condition_variable wake_, finished_;
  int asleep_ = 0;
  bool owner_asleep_ = false;
};

// Never destroyed: workers may sleep in it until the process is gone. A forked child has no workers, so it makes a pool of its own.
std::atomic<Pool*> the_pool{nullptr};
std::mutex making;

Pool& pool() {
  Pool* pool = the_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    std::lock_guard<std::mutex> lock(making);
    pool = the_pool.load(std::memory_order_relaxed);
    if (pool == nullptr) {
      static const int registered = pthread_atfork(
          [] { making.lock(); },
          [] { making.unlock(); },
          [] {
            the_pool.store(nullptr, std::memory_order_relaxed);
            making.unlock();
          });
      (void)registered;
      pool = new Pool(wanted_threads());
      the_pool.store(pool, std::memory_order_release);
    }
  }
  return *pool;
}

} // namespace

int thread_count() {
  return pool().threads();
}

namespace detail {

void run_parallel(size_t count, size_t grain, Body body, void* context) {
  if (count == 0) {
    return;
  }
  grain = std::max<size_t>({grain, 1, count >> 31}); // pieces are counted in 32 bits
  size_t pieces = (count + grain - 1) / grain;
  if (pieces > 1 && !inside && pool().threads() > 1) {
    inside = true;
    bool done = pool().run(count, grain, pieces, body, context);
    inside = false;
    if (done) {
      return;
    }
  }
  for (size_t begin = 0; begin < count; begin += grain) {
    body(context, begin, begin + grain < count ? begin + grain : count);
  }
}

} // namespace detail
} // namespace mlxinfer::cpu
