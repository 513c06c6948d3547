// Checks of what needs no MLX: the worker threads, and every kernel of this machine's instruction set against double precision. For
// sanitizers and for other processors under an emulator. Arguments: by how much to multiply the rounds of what looks for races, and
// "no-fork" where threads of a forked child are not supported: under ThreadSanitizer and in qemu.

#include "check.h"
#include "dispatch/isa.h"
#include "threads/pool.h"

int main(int count, char** arguments) {
  using namespace mlxinfer::cpu;
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 1;
  const bool may_fork = count < 3 || std::string(arguments[2]) != "no-fork";
  std::printf("%s, %d threads:", isa_name(), thread_count());
  auto run = [](const char* name, auto&& part) {
    std::printf(" %s", name);
    std::fflush(stdout);
    part();
  };
  run("pool", [=] { check::pool(rounds, may_fork); });
  run("floats", check::floats);
  run("products", check::products);
  run("attention", check::attention);
  run("recurrent", check::recurrent);
  run("together", [=] { check::together(rounds); });
  std::printf(": fine\n");
}
