// Runs a grid threadgroup by threadgroup. Within one, a simdgroup runs until its lanes wait for other simdgroups; lanes wait for one
// another at simd operations, all threads at threadgroup barriers, always at one line. When nobody can go on, that is divergence.
#include <stdio.h>
#include <string.h>

#include <vector>

#include "device.h"

namespace {

enum class Wait : uint32_t { none, lanes, simdgroup_barrier, threadgroup_barrier, ended };

using Token = uint64_t;  // what order is kept by; ThreadSanitizer does not tell apart what lies in one word of eight bytes

struct State {
  Wait wait;
  uint32_t kind, bytes, line;
  const char* file;
  Thread thread;
};

struct Simdgroup {
  alignas(64) char slots[2][LANES * 16];  // two, as lanes may still read the last operation's when others write the next one's
  uint32_t turn, first, lanes;
  Token tokens[2];
};

std::vector<State> states(MAX_THREADS);
Simdgroup simdgroups[MAX_THREADS / LANES];
uint32_t thread_count, simdgroup_count, current, barrier_turn;
Token begin_token, end_token, barrier_tokens[2];  // two, as a thread may come to the next barrier before another has left the last
uint64_t random_state;
Order order;
void (*kernel)();

uint32_t random_below(uint32_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t((random_state >> 16) % n);
}

void arrange(uint32_t* at, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) at[i] = order == Order::reversed ? n - 1 - i : i;
  if (order != Order::random) return;
  for (uint32_t i = n; i > 1; i--) {
    const uint32_t j = random_below(i), kept = at[i - 1];
    at[i - 1] = at[j];
    at[j] = kept;
  }
}

bool same_place(const State& a, const State& b) {
  return a.wait == b.wait && a.kind == b.kind && a.bytes == b.bytes && a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

void wait_here(Wait wait, uint32_t kind, uint32_t bytes, const char* file, int line) {
  State& s = states[current];
  s.wait = wait, s.kind = kind, s.bytes = bytes, s.file = file, s.line = uint32_t(line);
  fiber_pause(current, false);
}

void thread_body() {
  order_acquire(&begin_token);
  kernel();
  order_release(&end_token);
  states[current].wait = Wait::ended;
  fiber_pause(current, true);
}

// One line per run of threads that wait at the same place.
void describe(char* text, size_t room) {
  size_t used = 0;
  for (uint32_t i = 0, j; i < thread_count && used < room; i = j) {
    const State& s = states[i];
    const uint32_t group = s.thread.simdgroup;
    for (j = i; j < thread_count && states[j].thread.simdgroup == group && same_place(states[j], s);) j++;
    const char* what = s.wait == Wait::lanes               ? "wait in a simd operation"
                       : s.wait == Wait::simdgroup_barrier   ? "wait at a simdgroup_barrier"
                       : s.wait == Wait::threadgroup_barrier ? "wait at a threadgroup_barrier"
                                                             : "have ended";
    used += snprintf(text + used, room - used, "  simdgroup %u, lanes %u to %u %s", group, s.thread.lane, states[j - 1].thread.lane, what);
    if (used >= room) return;
    used += s.wait == Wait::ended ? snprintf(text + used, room - used, "\n") : snprintf(text + used, room - used, " (%s:%u)\n", s.file, s.line);
  }
}

[[noreturn]] void diverged() {
  static char text[64 << 10];
  describe(text, sizeof text);
  const uint32_t* at = states[0].thread.threadgroup_position;
  fail("divergence", "threads of threadgroup (%u, %u, %u) wait for one another in different places:\n%s", at[0], at[1], at[2], text);
}

[[noreturn]] void partial(const State& s, uint32_t lanes) {
  fail("partial simdgroup", "%s:%u: a simd operation in a simdgroup of only %u threads: make the threadgroup a multiple of 32", s.file,
       s.line, lanes);
}

bool lanes_meet(Simdgroup& g) {
  const State& first = states[g.first];
  if (first.wait != Wait::lanes && first.wait != Wait::simdgroup_barrier) return false;
  for (uint32_t i = 1; i < g.lanes; i++)
    if (!same_place(states[g.first + i], first)) return false;
  if (first.wait == Wait::lanes && g.lanes < LANES) partial(first, g.lanes);
  if (first.wait == Wait::simdgroup_barrier) trace_barrier(first.kind, false, g.first / LANES);
  for (uint32_t i = 0; i < g.lanes; i++) states[g.first + i].wait = Wait::none;
  g.turn ^= 1;
  return true;
}

void run_simdgroup(Simdgroup& g) {
  uint32_t lanes[LANES];
  arrange(lanes, g.lanes);
  do {
    if (order == Order::random) arrange(lanes, g.lanes);
    for (uint32_t i = 0; i < g.lanes; i++) {
      current = g.first + lanes[i];
      if (states[current].wait == Wait::none) fiber_resume(current);
    }
  } while (lanes_meet(g));
}

// After every simdgroup has stopped: all ended, all at one barrier, or never again.
bool threadgroup_meets() {
  const State& first = states[0];
  for (uint32_t i = 1; i < thread_count; i++)
    if (states[i].wait != first.wait || (first.wait == Wait::threadgroup_barrier && !same_place(states[i], first))) diverged();
  if (first.wait == Wait::ended) return false;
  if (first.wait != Wait::threadgroup_barrier) diverged();
  for (uint32_t i = 0; i < thread_count; i++) states[i].wait = Wait::none;
  trace_barrier(first.kind, true, 0);
  barrier_turn ^= 1;
  return true;
}

void place_threads(const Launch& l, const uint32_t* at, const uint32_t* threadgroups) {
  uint32_t size[3];
  for (int d = 0; d < 3; d++) {
    const uint32_t left = l.grid[d] - at[d] * l.threadgroup[d];
    size[d] = left < l.threadgroup[d] ? left : l.threadgroup[d];
  }
  thread_count = size[0] * size[1] * size[2];
  simdgroup_count = (thread_count + LANES - 1) / LANES;
  const uint32_t dispatched = l.threadgroup[0] * l.threadgroup[1] * l.threadgroup[2];
  for (uint32_t i = 0; i < thread_count; i++) {
    State& s = states[i];
    Thread& t = s.thread;
    s.wait = Wait::none;
    const uint32_t in[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
    for (int d = 0; d < 3; d++) {
      t.position_in_threadgroup[d] = in[d];
      t.threadgroup_position[d] = at[d];
      t.position_in_grid[d] = at[d] * l.threadgroup[d] + in[d];
      t.grid[d] = l.grid[d];
      t.threads[d] = size[d];
      t.dispatched[d] = l.threadgroup[d];
      t.threadgroups[d] = threadgroups[d];
    }
    t.lane = i % LANES, t.simdgroup = i / LANES, t.index = i;
    t.simdgroups = simdgroup_count, t.dispatched_simdgroups = (dispatched + LANES - 1) / LANES;
    t.arguments = l.arguments;
    fiber_prepare(i, thread_body);
  }
}

void run_threadgroup(const Launch& l) {
  for (uint64_t i = 0; i < l.array_count; i++) array_forget(l.arrays[i], l.origin);
  for (uint32_t i = 0; i < simdgroup_count; i++) {
    const uint32_t first = i * LANES;
    simdgroups[i].turn = 0, simdgroups[i].first = first;
    simdgroups[i].lanes = thread_count - first < LANES ? thread_count - first : LANES;
  }
  order_release(&begin_token);
  uint32_t turns[MAX_THREADS / LANES];
  do {
    arrange(turns, simdgroup_count);
    for (uint32_t i = 0; i < simdgroup_count; i++) run_simdgroup(simdgroups[turns[i]]);
  } while (threadgroup_meets());
  order_acquire(&end_token);
}

}  // namespace

extern "C" {
const Thread* __emu_self() { return &states[current].thread; }
uint32_t __emu_lane() { return states[current].thread.lane; }
void* __emu_slots() {
  Simdgroup& g = simdgroups[states[current].thread.simdgroup];
  return g.slots[g.turn];
}
void __emu_meet(uint32_t kind, uint32_t bytes, const char* file, int line) { wait_here(Wait::lanes, kind, bytes, file, line); }
void __emu_barrier(uint32_t whole_threadgroup, uint32_t flags, const char* file, int line) {
  Simdgroup& g = simdgroups[states[current].thread.simdgroup];
  void* token = whole_threadgroup ? &barrier_tokens[barrier_turn] : &g.tokens[g.turn];
  if (flags) order_release(token);
  wait_here(whole_threadgroup ? Wait::threadgroup_barrier : Wait::simdgroup_barrier, flags, 0, file, line);
  if (flags) order_acquire(token);
}
}

void run(const Launch& l) {
  order = l.order;
  kernel = l.kernel;
  random_state = l.seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
  uint32_t threadgroups[3];
  for (int d = 0; d < 3; d++) threadgroups[d] = (l.grid[d] + l.threadgroup[d] - 1) / l.threadgroup[d];
  std::vector<uint32_t> turns(size_t(threadgroups[0]) * threadgroups[1] * threadgroups[2]);
  arrange(turns.data(), uint32_t(turns.size()));
  for (const uint32_t i : turns) {
    const uint32_t at[3] = {i % threadgroups[0], i / threadgroups[0] % threadgroups[1], i / (threadgroups[0] * threadgroups[1])};
    place_threads(l, at, threadgroups);
    trace_threadgroup(i);
    run_threadgroup(l);
  }
}
