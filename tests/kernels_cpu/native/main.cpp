// Checks of what needs no MLX: the worker threads, and every kernel of this machine's instruction set against double precision. For
// sanitizers and for other processors under an emulator. An argument multiplies the rounds of what looks for races.

#include "check.h"
#include "dispatch/isa.h"
#include "threads/pool.h"

int main(int count, char** arguments) {
  using namespace mlxinfer::cpu;
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 1;
  std::printf("%s, %d threads:", isa_name(), thread_count());
  auto run = [](const char* name, auto&& part) {
    std::printf(" %s", name);
    std::fflush(stdout);
    part();
  };
  run("pool", [=] { check::pool(rounds); });
  run("floats", check::floats);
  run("products", check::products);
  run("attention", check::attention);
  run("together", [=] { check::together(rounds); });
  std::printf(": fine\n");
}
