#include "threads/cpus.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace mlxinfer::cpu {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

int affinity() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return CPU_COUNT(&set);
  }
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

// cgroup v2: "max 100000" or "150000 100000".
double quota_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period && period > 0 ? quota / period : kNoLimit;
}

double quota_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  return quota_file >> quota && period_file >> period && quota > 0 && period > 0 ? quota / period : kNoLimit;
}

// The least of a group and its parents; a container sees its own group as the root.
double quota_upwards(const std::string& root, std::string path, double (*read)(const std::string&)) {
  double least = read(root);
  while (path.size() > 1) {
    least = std::min(least, read(root + path));
    path.erase(path.rfind('/'));
  }
  return least;
}

double cgroup_quota() {
  double least = kNoLimit;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",", path = line.substr(second + 1);
    if (controllers == ",,") {
      least = std::min(least, quota_upwards("/sys/fs/cgroup", path, quota_v2));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      least = std::min(least, quota_upwards("/sys/fs/cgroup/cpu", path, quota_v1));
    }
  }
  return least;
}

} // namespace

int allowed_cpus() {
  double quota = cgroup_quota();
  int cpus = std::max(affinity(), 1);
  return quota < cpus ? std::max(static_cast<int>(std::ceil(quota)), 1) : cpus;
}

int wanted_threads() {
  if (const char* text = std::getenv("MLXINFER_THREADS")) {
    char* end = nullptr;
    long count = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && count >= 1 && count <= 256) {
      return static_cast<int>(count);
    }
  }
  return allowed_cpus();
}

} // namespace mlxinfer::cpu
