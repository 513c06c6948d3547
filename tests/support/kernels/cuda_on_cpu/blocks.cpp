// Blocks of threads, one block after another, a fiber for each of its threads. A thread runs until it has to wait for its warp or its
// block; both wait for all of theirs, and a thread that has ended or waits elsewhere is an error.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

struct Index {
  unsigned x, y, z;
};
Index threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr unsigned MOST = 1024, STACK = 256 << 10;
enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Thread {
  ucontext_t context;
  char* stack;
  State state;
  int line;
};

Thread threads[MOST];
ucontext_t scheduler;
unsigned count, current;
char slots[MOST][2][16];
unsigned turn[MOST];
void (*kernel)(void**);
void** arguments;

void pause(State state, int line) {
  threads[current].state = state;
  threads[current].line = line;
  swapcontext(&threads[current].context, &scheduler);
}

void body() {
  kernel(arguments);
  pause(DONE, 0);
}

void prepare(unsigned i) {
  Thread& t = threads[i];
  if (!t.stack) t.stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  getcontext(&t.context);
  t.context.uc_stack.ss_sp = t.stack;
  t.context.uc_stack.ss_size = STACK;
  makecontext(&t.context, body, 0);
  t.state = READY;
  turn[i] = 0;
}

// Lets threads go on whose whole warp or block waits; tells whether there are any.
bool release(unsigned begin, unsigned end, State state) {
  for (unsigned i = begin; i < end; i++) {
    if (threads[i].state != state || threads[i].line != threads[begin].line) return false;
  }
  for (unsigned i = begin; i < end; i++) threads[i].state = READY;
  return true;
}

const char* run_block() {
  for (unsigned i = 0; i < count; i++) prepare(i);
  for (unsigned done = 0; done < count;) {
    bool moved = false;
    for (unsigned i = 0; i < count; i++) {
      if (threads[i].state != READY) continue;
      current = i;
      threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
      swapcontext(&scheduler, &threads[i].context);
      done += threads[i].state == DONE;
      moved = true;
    }
    for (unsigned i = 0; i < count; i += 32) moved |= release(i, i + 32, AT_WARP);
    moved |= release(0, count, AT_BLOCK);
    if (!moved) return "threads wait for one another in different places";
  }
  return nullptr;
}

}  // namespace

extern "C" {

unsigned cuda_lane() { return current % 32; }
void cuda_meet_block(int line) { pause(AT_BLOCK, line); }

// Slots are used in turns, so that a lane may go on before others have read.
void cuda_exchange(const void* mine, void* result, unsigned size, unsigned from) {
  const unsigned self = current, which = turn[self]++ % 2;
  memcpy(slots[self][which], mine, size);
  pause(AT_WARP, 0);
  memcpy(result, slots[self / 32 * 32 + from][which], size);
}

// Returns what went wrong, or null.
const char* cuda_launch(void (*function)(void**), void** with, const unsigned* grid, const unsigned* block) {
  kernel = function;
  arguments = with;
  blockDim = {block[0], block[1], block[2]};
  gridDim = {grid[0], grid[1], grid[2]};
  count = block[0] * block[1] * block[2];
  if (count % 32 || count > MOST) return "a block is not made of whole warps";
  for (unsigned i = 0; i < grid[0] * grid[1] * grid[2]; i++) {
    blockIdx = {i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1])};
    if (const char* problem = run_block()) return problem;
  }
  return nullptr;
}
}
