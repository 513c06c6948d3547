// Jobs of every size, from several threads at once: each index is visited once, before parallel_for returns.

#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "threads/pool.h"

namespace mlxinfer::cpu::check {
namespace {

void one_job(Random& random) {
  const auto count = static_cast<size_t>(between(random, 0, 40)), grain = static_cast<size_t>(between(random, 0, 5));
  const bool nested = between(random, 0, 9) == 0;
  std::vector<int> visits(count, 0); // no atomics: a race on them is one that a kernel's output would have
  parallel_for(count, grain, [&](size_t begin, size_t end) {
    auto visit = [&](size_t from, size_t to) {
      for (size_t i = from; i < to; ++i) {
        ++visits[i];
      }
    };
    if (nested) {
      parallel_for(end - begin, 1, [&](size_t from, size_t to) { visit(begin + from, begin + to); });
    } else {
      visit(begin, end);
    }
  });
  for (int visited : visits) {
    expect(visited == 1, "an index was visited " + std::to_string(visited) + " times");
  }
}

// Workers sleep after 50 us without work, so every now and then they are let sleep, or nearly.
void many_jobs(uint64_t seed, int jobs) {
  Random random(seed);
  for (int i = 0; i < jobs; ++i) {
    one_job(random);
    if (between(random, 0, 99) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(between(random, 30, 120)));
    }
  }
}

void forked_child_computes() {
  const pid_t child = fork();
  if (child == 0) {
    many_jobs(99, 200);
    _exit(0);
  }
  int status = 0;
  expect(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a forked child computes");
}

} // namespace

void pool(int rounds, bool may_fork) {
  many_jobs(0, 3000 * rounds);
  std::vector<std::thread> threads;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back(many_jobs, seed, 3000 * rounds);
  }
  for (auto& thread : threads) {
    thread.join();
  }
  if (may_fork) {
    forked_child_computes();
  }
}

} // namespace mlxinfer::cpu::check
