#include "recurrent/work.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "memory/scratch.h"
#include "mixture/mixture.h"
#include "recurrent/recurrent.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kChunk = 64; // rows whose inputs stay in a core's cache

void widen(Float dtype, const Rows& rows, int64_t row, int64_t first, float* out, int64_t size) {
  const char* from = static_cast<const char*>(rows.data) + (row * rows.stride + first) * item_bytes(dtype);
  mixture_kernels().widen[static_cast<int>(dtype)](from, out, size);
}

float softplus(float x) {
  return x > 20.0f ? x : std::log1p(std::exp(x));
}

// Neighbouring channels of a convolution.
struct Span {
  int64_t first, count;
  bool keeps; // whether the window's new content is this task's to write
};

// Runs some channels of a convolution, chunk by chunk: rows before the chunk are kept at the front of `input`.
template <size_t N>
class Convolved {
 public:
  Convolved(const Convolution& c, std::array<Span, N> spans, int64_t sequence, int64_t rows, Scratch& scratch) : c_(c), spans_(spans), sequence_(sequence) {
    for (const Span& span : spans) {
      width_ += span.count;
    }
    const int64_t most = std::min(rows, kChunk);
    input_ = scratch.floats((most + c.taps - 1 + most) * width_);
    output_ = input_ + (most + c.taps - 1) * width_;
    for (int64_t t = 0; t < c.taps - 1; ++t) {
      int64_t at = t * width_;
      for (const Span& span : spans_) {
        std::copy_n(c.window_from + (sequence * (c.taps - 1) + t) * c.channels + span.first, span.count, input_ + at);
        at += span.count;
      }
    }
  }

  // Where row `t` of the chunk comes to.
  float* input(int64_t t) {
    return input_ + (c_.taps - 1 + t) * width_;
  }

  // The chunk's inputs are `count` rows of `rows` from `start` on.
  void take(Float dtype, const Rows& rows, int64_t start, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      float* to = input(t);
      for (const Span& span : spans_) {
        widen(dtype, rows, start + t, span.first, to, span.count);
        to += span.count;
      }
    }
  }

  // The chunk's results, rows of all spans behind one another.
  float* run(int64_t count, bool silu) {
    for (int64_t t = 0; t < count; ++t) {
      int64_t at = 0;
      for (const Span& span : spans_) {
        recurrent_kernels().convolve(
            input_ + t * width_ + at, width_, c_.weights + span.first, c_.channels, c_.bias == nullptr ? nullptr : c_.bias + span.first, c_.taps, silu,
            output_ + t * width_ + at, span.count);
        at += span.count;
      }
    }
    std::memmove(input_, input_ + count * width_, static_cast<size_t>((c_.taps - 1) * width_) * sizeof(float));
    return output_;
  }

  void keep() const {
    for (int64_t t = 0; t < c_.taps - 1; ++t) {
      int64_t at = t * width_;
      for (const Span& span : spans_) {
        if (span.keeps) {
          std::copy_n(input_ + at, span.count, c_.window_to + (sequence_ * (c_.taps - 1) + t) * c_.channels + span.first);
        }
        at += span.count;
      }
    }
  }

  int64_t width() const {
    return width_;
  }

 private:
  const Convolution& c_;
  const std::array<Span, N> spans_;
  const int64_t sequence_;
  int64_t width_ = 0;
  float *input_, *output_;
};

void run_delta(const DeltaWork& w, int64_t sequence, int64_t head) {
  static thread_local Scratch scratch, small;
  const Stretch& stretch = w.stretches->all[static_cast<size_t>(sequence)];
  const int64_t each = w.value_heads / w.key_heads, keys = w.key_heads * w.key_dim, first = head * each;
  const std::array<Span, 3> spans{{{head * w.key_dim, w.key_dim, true},
                                   {keys + head * w.key_dim, w.key_dim, true},
                                   {2 * keys + first * w.value_dim, each * w.value_dim, true}}};
  Convolved<3> convolved(w.convolution, spans, sequence, stretch.count, scratch);
  float *beta = small.floats(each + 2 * each * w.decays), *rate = beta + each, *kept = rate + each * w.decays;
  const int64_t state_size = w.value_dim * w.key_dim, width = w.value_heads * w.value_dim;
  const float* from = w.state_from + (sequence * w.value_heads + first) * state_size;
  float* to = w.state_to + (sequence * w.value_heads + first) * state_size;
  for (int64_t done = 0; done < stretch.count; done += kChunk) {
    const int64_t count = std::min(kChunk, stretch.count - done), start = stretch.start + done;
    convolved.take(w.dtype, w.qkv, start, count);
    float* row = convolved.run(count, true);
    for (int64_t t = 0; t < count; ++t, row += convolved.width()) {
      recurrent_kernels().unit(row, w.key_dim, 1e-6f, 1.0f / std::sqrt(static_cast<float>(w.key_dim)));
      recurrent_kernels().unit(row + w.key_dim, w.key_dim, 1e-6f, 1.0f);
      widen(w.dtype, w.beta, start + t, first, beta, each);
      widen(w.dtype, w.rate, start + t, first * w.decays, rate, each * w.decays);
      if (w.decays > 1) {
        recurrent_kernels().shares(rate, w.decay_bias + first * w.decays, w.decay + first * w.decays, kept, each * w.decays);
      }
      for (int64_t j = 0; j < each; ++j) {
        const float *before = (done + t == 0 ? from : to) + j * state_size, *value = row + 2 * w.key_dim + j * w.value_dim;
        const float share = 1.0f / (1.0f + std::exp(-beta[j]));
        float *after = to + j * state_size, *y = w.out + (start + t) * width + (first + j) * w.value_dim;
        if (w.decays == 1) {
          const float left = std::exp(-std::exp(w.decay[first + j]) * softplus(rate[j] + w.decay_bias[first + j]));
          recurrent_kernels().delta(before, after, w.value_dim, w.key_dim, row, row + w.key_dim, value, left, share, y);
        } else {
          const float* own = kept + j * w.decays;
          recurrent_kernels().delta_by_channel(before, after, w.value_dim, w.key_dim, row, row + w.key_dim, value, own, share, y);
        }
      }
    }
  }
  convolved.keep();
}

// Heads `first` to `last` of one group.
void run_mamba(const MambaWork& w, int64_t sequence, int64_t first, int64_t last) {
  static thread_local Scratch scratch, small;
  const Stretch& stretch = w.stretches->all[static_cast<size_t>(sequence)];
  const int64_t count_of_heads = last - first, each = w.heads / w.groups, group = first / each, inner = w.heads * w.dim;
  const bool keeps = first % each == 0;
  const std::array<Span, 3> spans{{{first * w.dim, count_of_heads * w.dim, true},
                                   {inner + group * w.size, w.size, keeps},
                                   {inner + (w.groups + group) * w.size, w.size, keeps}}};
  Convolved<3> convolved(w.convolution, spans, sequence, stretch.count, scratch);
  float* steps = small.floats(count_of_heads);
  const int64_t state_size = w.dim * w.size;
  const float* from = w.state_from + (sequence * w.heads + first) * state_size;
  float* to = w.state_to + (sequence * w.heads + first) * state_size;
  for (int64_t done = 0; done < stretch.count; done += kChunk) {
    const int64_t count = std::min(kChunk, stretch.count - done), start = stretch.start + done;
    convolved.take(w.dtype, w.mixed, start, count);
    float* row = convolved.run(count, true);
    for (int64_t t = 0; t < count; ++t, row += convolved.width()) {
      const float *write = row + count_of_heads * w.dim, *read = write + w.size;
      widen(w.dtype, w.steps, start + t, first, steps, count_of_heads);
      for (int64_t j = 0; j < count_of_heads; ++j) {
        const float step = std::clamp(softplus(steps[j] + w.step_bias[first + j]), w.least, w.most);
        const float kept = std::exp(-std::exp(w.decay[first + j]) * step);
        recurrent_kernels().mamba(
            (done + t == 0 ? from : to) + j * state_size, to + j * state_size, w.dim, w.size, write, read, row + j * w.dim, kept, step,
            w.skip[first + j], w.out + (start + t) * inner + (first + j) * w.dim);
      }
    }
  }
  convolved.keep();
}

void run_short(const ShortConvWork& w, int64_t sequence, int64_t first, int64_t count_of_channels) {
  static thread_local Scratch scratch;
  const Stretch& stretch = w.stretches->all[static_cast<size_t>(sequence)];
  Convolved<1> convolved(w.convolution, {{{first, count_of_channels, true}}}, sequence, stretch.count, scratch);
  const int type = static_cast<int>(w.dtype);
  const int64_t item = item_bytes(w.dtype);
  auto at = [&](const Rows& rows, int64_t row) { return static_cast<const char*>(rows.data) + (row * rows.stride + first) * item; };
  for (int64_t done = 0; done < stretch.count; done += kChunk) {
    const int64_t count = std::min(kChunk, stretch.count - done), start = stretch.start + done;
    for (int64_t t = 0; t < count; ++t) {
      recurrent_kernels().times[type](at(w.before, start + t), at(w.x, start + t), convolved.input(t), count_of_channels);
    }
    const float* row = convolved.run(count, false);
    for (int64_t t = 0; t < count; ++t, row += count_of_channels) {
      char* out = static_cast<char*>(w.out) + ((start + t) * w.convolution.channels + first) * item;
      recurrent_kernels().back[type](row, at(w.after, start + t), out, count_of_channels);
    }
  }
  convolved.keep();
}

} // namespace

void DeltaWork::run() const {
  const auto sequences = static_cast<int64_t>(stretches->all.size());
  parallel_for(static_cast<size_t>(sequences * key_heads), 1, [this](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      run_delta(*this, i / key_heads, i % key_heads);
    }
  });
}

void MambaWork::run() const {
  const auto sequences = static_cast<int64_t>(stretches->all.size());
  const int64_t each = heads / groups, wanted = std::max<int64_t>(1, heads / (3 * thread_count())), size = std::min(each, wanted);
  const int64_t pieces = (each + size - 1) / size; // of a group
  parallel_for(static_cast<size_t>(sequences * groups * pieces), 1, [&](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      const int64_t sequence = i / (groups * pieces), group = i / pieces % groups, piece = i % pieces;
      run_mamba(*this, sequence, group * each + piece * size, group * each + std::min(each, (piece + 1) * size));
    }
  });
}

void ShortConvWork::run() const {
  constexpr int64_t kChannels = 512;
  const int64_t pieces = (convolution.channels + kChannels - 1) / kChannels;
  parallel_for(stretches->all.size() * static_cast<size_t>(pieces), 1, [&](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      const int64_t first = i % pieces * kChannels;
      run_short(*this, i / pieces, first, std::min(kChannels, convolution.channels - first));
    }
  });
}

void GatedRows::run() const {
  const int64_t width = gate.size, size = width / groups, item = item_bytes(dtype);
  const auto grain = static_cast<size_t>(std::max<int64_t>(1, 8192 / size));
  parallel_for(static_cast<size_t>(gate.count * groups), grain, [&](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      const int64_t row = i / groups, first = i % groups * size;
      const float* w = weight == nullptr || shared ? weight : weight + first;
      recurrent_kernels().gated[static_cast<int>(dtype)](
          x + row * width + first, static_cast<const char*>(gate.data) + (row * gate.stride + first) * item, w, eps, normed, this->first, silu,
          static_cast<char*>(out) + (row * width + first) * item, size);
    }
  });
}

} // namespace mlxinfer::cpu
