// Serves launches over its standard input and output until the input ends; worker.py has the other side.
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <map>
#include <string>
#include <vector>

#include "device.h"

namespace {

int answers;  // what was standard output; that now is standard error, so that nothing mixes with the answers

bool receive(void* to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = read(0, (char*)to + done, bytes - done);
    if (got <= 0) return false;
    done += size_t(got);
  }
  return true;
}

void send(const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t sent = write(answers, (const char*)from + done, bytes - done);
    if (sent <= 0) _exit(2);
    done += size_t(sent);
  }
}

template <typename T>
T receive() {
  T x{};
  if (!receive(&x, sizeof x)) _exit(0);
  return x;
}

struct Kernel {
  void (*entry)();
  const Array* arrays;
  uint64_t array_count;
  uint32_t origin;
};

const Kernel& kernel_at(const std::string& path) {
  static std::map<std::string, Kernel> loaded;
  auto it = loaded.find(path);
  if (it != loaded.end()) return it->second;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail("compile", "%s", dlerror());
  const auto* count = (const uint64_t*)dlsym(library, "__emu_array_count");
  auto* origin = (uint32_t (*)())dlsym(library, "__emu_origin");
  const Kernel k = {(void (*)())dlsym(library, "__emu_entry"), (const Array*)dlsym(library, "__emu_arrays"), *count, origin ? origin() : 0};
  return loaded.emplace(path, k).first->second;
}

void check_arrays(const Kernel& k) {
  uint64_t sum = 0;
  std::string text;
  for (uint64_t i = 0; i < k.array_count; i++) {
    sum += k.arrays[i].bytes;
    text += "\n  " + std::string(k.arrays[i].name) + ": " + std::to_string(k.arrays[i].bytes) + " bytes";
  }
  if (sum > THREADGROUP_BYTES) fail("threadgroup memory", "%lu bytes of threadgroup memory, at most %u:%s", sum, THREADGROUP_BYTES, text.c_str());
}

// Everything that a launch sends and gets: see worker.py.
void serve() {
  const std::string path(receive<uint32_t>(), '\0');
  receive((void*)path.data(), path.size());
  struct {
    uint32_t grid[3], threadgroup[3], order, buffers;
    uint64_t seed;
  } head = receive<decltype(head)>();
  std::vector<Buffer> buffers;
  std::vector<size_t> arguments;
  for (uint32_t i = 0; i < head.buffers; i++) {
    const auto bytes = receive<uint64_t>();
    buffers.push_back(buffer_make(bytes, Kind(receive<uint64_t>())));
    arguments.push_back(size_t(buffers.back().at));
  }
  for (Buffer& b : buffers)
    if (b.kind != Kind::output) {
      receive(b.at, b.bytes);
      buffer_ready(b);
    }
  const Kernel& k = kernel_at(path);
  check_arrays(k);
  trace_begin(buffers.data(), head.buffers, k.arrays, k.array_count);
  run({k.entry, k.arrays, k.array_count, {head.grid[0], head.grid[1], head.grid[2]},
       {head.threadgroup[0], head.threadgroup[1], head.threadgroup[2]}, Order(head.order), head.seed, arguments.data(), k.origin});
  for (uint32_t i = 0; i < head.buffers; i++) buffer_check(buffers[i], i);
  const uint32_t good = 0;
  send(&good, sizeof good);
  for (uint32_t i = 0; i < head.buffers; i++) {
    const Traffic t = traffic_of(i);
    send(&t, sizeof t);
    if (buffers[i].kind != Kind::input) send(buffers[i].at, buffers[i].bytes);
  }
  for (Buffer& b : buffers) free(b.at);
}

}  // namespace

void fail(const char* kind, const char* format, ...) {
  static char text[96 << 10];
  va_list arguments;
  va_start(arguments, format);
  int length = snprintf(text, sizeof text, "%s\n", kind);
  length += vsnprintf(text + length, sizeof text - size_t(length), format, arguments);
  va_end(arguments);
  const uint32_t head[2] = {1, uint32_t(length) < sizeof text ? uint32_t(length) : uint32_t(sizeof text - 1)};
  send(head, sizeof head);
  send(text, head[1]);
  _exit(1);
}

int main() {
  answers = dup(1);
  dup2(2, 1);
  for (;;) serve();
}
