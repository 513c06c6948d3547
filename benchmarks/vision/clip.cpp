// Encodes images with llama.cpp's tower: clip MMPROJ SIDE THREADS. Every line of the input is a job, as in benchmarks/vision/worker.py.
// Written for the llama.cpp of llama-cpp-python 0.3.36, whose clip.h is internal; README.md says how to build it.

#include <chrono>
#include <ctime>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "clip-impl.h"

static double processor_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: clip MMPROJ SIDE THREADS" << std::endl;
    return 2;
  }
  const int side = std::stoi(argv[2]), threads = std::stoi(argv[3]);
  clip_context_params params{};
  params.flash_attn_type = CLIP_FLASH_ATTN_TYPE_AUTO;
  params.image_min_tokens = params.image_max_tokens = -1;
  clip_ctx* tower = clip_init(argv[1], params).ctx_v;
  if (tower == nullptr) {
    return 1;
  }
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<float> pixels(size_t(3) * side * side), features;
  for (float& value : pixels) {
    value = normal(random);
  }
  clip_image_f32 image;
  image.set_size({side, side}, false, false);
  image.cpy_buf(pixels);
  for (std::string job; std::getline(std::cin, job);) {
    const double used = processor_seconds();
    const auto start = std::chrono::steady_clock::now();
    if (job.find("encode") != std::string::npos && !clip_image_encode(tower, threads, &image, features)) {
      std::cout << R"({"error": "the image was not encoded"})" << std::endl;
      continue;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << R"({"seconds": )" << seconds.count() << R"(, "cpu_s": )" << processor_seconds() - used << R"(, "idle_cpu_s": 0})" << std::endl;
  }
}
