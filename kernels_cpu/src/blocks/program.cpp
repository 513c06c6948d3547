#include "blocks/program.h"

#include <algorithm>

namespace mlxinfer::cpu {
namespace {

constexpr const char* kName = "blocks";

void need(bool fits, const std::string& what) {
  if (!fits) {
    refuse(kName, what + " does not fit.");
  }
}

void check_vector(const mx::array& a, int64_t size, mx::Dtype dtype, const char* what) {
  if (static_cast<int64_t>(a.size()) != size || a.ndim() != 1 || a.dtype() != dtype || !a.flags().row_contiguous) {
    refuse(kName, std::string(what) + " " + dtype_text(a) + " " + shape_text(a.shape()) + " must have " + std::to_string(size) + " elements.");
  }
}

void check_matrix(const mx::array& a, int64_t rows, int64_t columns, mx::Dtype dtype, const char* what) {
  if (a.shape() != mx::Shape{static_cast<int>(rows), static_cast<int>(columns)} || a.dtype() != dtype || !a.flags().row_contiguous) {
    refuse(kName, std::string(what) + " " + dtype_text(a) + " " + shape_text(a.shape()) + " must be [" + std::to_string(rows) + ", " +
           std::to_string(columns) + "].");
  }
}

// Checks one instruction after another, and finds how large the buffers are.
class Checker {
 public:
  explicit Checker(Blocks& blocks) : b_(blocks), item_(static_cast<int64_t>(mx::size_of(blocks.dtype))) {}

  void operator()(const Multiply& m) {
    const Projection& p = m.projection;
    const bool many = p.data.ndim() == 3;
    need((many || p.data.ndim() == 2) && p.data.shape(-2) == p.layout.panels() && p.data.shape(-1) == p.layout.panel_bytes(), "a packed matrix");
    const int64_t n = m.gate ? p.layout.n / 2 : p.layout.n;
    if (same(m.x) != p.layout.k || (m.onto && (same(*m.onto) != n || m.onto->each != m.y.each)) || made(m.y) != n || !m.y.is_whole()) {
      refuse(kName, "the matrix [" + std::to_string(p.layout.n) + ", " + std::to_string(p.layout.k) + "] cannot make " + std::to_string(m.y.count) +
             " columns of " + std::to_string(m.x.count) + ".");
    }
    need(!m.gate || (p.layout.n % (2 * kPanelRows) == 0 && !m.onto), "a gate, whose halves need a multiple of 16 rows each,");
    need((many || !m.experts) && m.y.each % m.x.each == 0 && (many || m.y.each == m.x.each), "the number of rows of a product");
    need(!many || m.experts || (m.y.each == p.data.shape(0) && m.x.each == m.y.each), "a matrix for each of the neighbouring rows");
    if (m.experts) {
      need(take(*m.experts, Kind::i32) == 1 && m.experts->width == 1 && m.experts->each == m.y.each && p.data.shape(0) > 0, "the choice of experts");
    }
    if (p.bias && many) {
      check_matrix(*p.bias, p.data.shape(0), p.layout.n, b_.dtype, "biases");
    } else if (p.bias) {
      check_vector(*p.bias, p.layout.n, b_.dtype, "a bias");
    }
    if (m.norm) {
      need(!m.norm->centring, "a norm that subtracts the mean before a product");
      check_vector(m.norm->weight, p.layout.k, b_.dtype, "a norm");
    }
  }

  void operator()(const NormView& n) {
    need((!n.onto || (same(*n.onto) == n.y.count && n.onto->each == n.y.each)) && same(n.x) == made(n.y) && n.x.each == n.y.each, "a norm's rows");
    check_vector(n.norm.weight, n.x.count, b_.dtype, "a norm");
  }

  void operator()(const Attend& a) {
    need(same(a.queries) > 0 && made(a.y) > 0 && a.y.is_whole() && a.query_step > 0 && a.queries.each == 1 && a.y.each == 1, "attention");
    for (const auto* v : {&a.turned, &a.keys, &a.values}) {
      need(!*v || (same(**v) > 0 && (*v)->each == 1), "a row of attention");
    }
    need(a.still >= 0 && (!a.turned || (a.still > 0 && a.turned_step > 0)), "what is rotated");
    check_pages_of(a);
    for (const auto* norm : {&a.query_norm, &a.key_norm, &a.value_norm}) {
      if (*norm) {
        need(!(*norm)->centring, "a head's norm that subtracts the mean");
        check_vector((*norm)->weight, (*norm)->weight.size(), b_.dtype, "a head's norm");
      }
    }
    if (a.query_gain) {
      check_vector(*a.query_gain, a.query_gain->size(), mx::float32, "a gain");
    }
    if (a.sinks) {
      check_vector(*a.sinks, a.sinks->size(), mx::float32, "sinks");
    }
    b_.attends.push_back(&a);
  }

  void operator()(const ChooseExperts& c) {
    const Route& r = c.route;
    need(same(c.logits) == r.experts && c.logits.each == 1 && r.experts > 0 && r.chosen > 0 && r.chosen <= r.experts, "a router");
    need(made(c.experts, Kind::i32) == 1 && made(c.shares, Kind::f32) == 1 && c.experts.each == r.chosen && c.shares.each == r.chosen &&
         c.experts.width == 1 && c.shares.width == 1, "what a router gives");
    need(r.groups > 0 && r.kept > 0 && r.kept <= r.groups && r.experts % r.groups == 0 && r.ranked > 0 &&
         r.chosen <= r.experts / r.groups * r.kept, "a router's groups");
    for (const auto* a : {&c.bias, &c.gains}) {
      if (*a) {
        check_vector(**a, r.experts, mx::float32, "a router's bias or gain");
      }
    }
  }

  void operator()(const AddRows& a) {
    need(!a.onto || (same(*a.onto) == a.y.count && a.onto->each == 1), "what a sum is added to");
    need(!a.shares || (take(*a.shares, Kind::f32) == 1 && a.shares->width == 1 && a.shares->each == a.x.each), "the shares of a sum");
    need(!a.gate || (same(*a.gate) == 1 && a.gate->each == 1 && a.x.each == 1 && !a.shares), "the gate of a sum");
    need(same(a.x) == made(a.y) && a.y.each == 1, "rows of a sum");
  }

  void operator()(const GateView& g) {
    need(same(g.x) == g.y.count && g.parts > 0 && g.x.count % g.parts == 0 && g.x.each == g.y.each && g.x.each == g.gate.each, "what a gate is for");
    need(same(g.gate) >= (g.parts - 1) * g.gate_step + g.x.count / g.parts && g.gate_step >= 0 && made(g.y) > 0, "a gate");
    need(!g.experts || (take(*g.experts, Kind::i32) == 1 && g.experts->width == 1 && g.experts->each == g.y.each), "the experts of a gate");
  }

  void operator()(const ExpertWaves& w) {
    need(w.pool != nullptr && take(w.experts, Kind::i32) == 1 && w.experts.width == 1, "the experts of waves");
    need(made(w.slots, Kind::i32) == 1 && w.slots.width == 1 && w.slots.each == w.experts.each, "the slots of waves");
    need(!w.expected || (take(*w.expected, Kind::i32) == 1 && w.expected->width == 1), "expected experts");
    const auto left = static_cast<int64_t>(b_.instructions.size()) - next_;
    need(w.count > 0 && w.count <= left, "the number of instructions in a wave");
    for (int64_t i = next_; i < next_ + w.count; ++i) {
      const Instruction& each = b_.instructions[static_cast<size_t>(i)];
      const auto *product = std::get_if<Multiply>(&each);
      const auto *gate = std::get_if<GateView>(&each);
      const std::optional<View>* chosen = product != nullptr ? &product->experts : gate != nullptr ? &gate->experts : nullptr;
      need(chosen != nullptr && *chosen && (*chosen)->buffer == w.slots.buffer, "an instruction in a wave");
    }
  }

  void check(const Instruction& instruction) {
    ++next_;
    std::visit(*this, instruction);
  }

  void operator()(const Delta& d) {
    need(d.key_heads > 0 && d.key_dim > 0 && d.value_dim > 0 && d.value_heads > 0 && d.value_heads % d.key_heads == 0 && d.taps > 1, "a gated delta net");
    const int64_t channels = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim;
    need(same(d.qkv) == channels && same(d.beta) == d.value_heads, "what a gated delta net reads");
    need(same(d.rate) == d.value_heads || d.rate.count == d.value_heads * d.key_dim, "the decay of a gated delta net");
    make_floats(d.y, d.value_heads * d.value_dim);
    check_matrix(d.convolution, d.taps, channels, mx::float32, "a convolution");
    check_vector(d.decay, d.rate.count, mx::float32, "a decay");
    check_vector(d.decay_bias, d.rate.count, mx::float32, "a decay's bias");
    keep({{d.taps - 1, channels}, {d.value_heads, d.value_dim, d.key_dim}});
  }

  void operator()(const Mamba& m) {
    need(m.heads > 0 && m.dim > 0 && m.size > 0 && m.groups > 0 && m.heads % m.groups == 0 && m.taps > 1, "a Mamba layer");
    const int64_t inner = m.heads * m.dim, channels = inner + 2 * m.groups * m.size;
    need(same(m.mixed) == channels && same(m.steps) == m.heads, "what a Mamba layer reads");
    make_floats(m.y, inner);
    check_matrix(m.convolution, m.taps, channels, mx::float32, "a convolution");
    if (m.bias) {
      check_vector(*m.bias, channels, mx::float32, "a convolution's bias");
    }
    for (const mx::array* a : {&m.decay, &m.skip, &m.step_bias}) {
      check_vector(*a, m.heads, mx::float32, "a vector of heads");
    }
    keep({{m.taps - 1, channels}, {m.heads, m.dim, m.size}});
  }

  void operator()(const ShortConvolution& s) {
    const int64_t channels = same(s.x);
    need(same(s.before) == channels && same(s.after) == channels && made(s.y) == channels && s.y.is_whole() && s.taps > 1, "a short convolution");
    check_matrix(s.convolution, s.taps, channels, mx::float32, "a convolution");
    if (s.bias) {
      check_vector(*s.bias, channels, mx::float32, "a convolution's bias");
    }
    keep({{s.taps - 1, channels}});
  }

  void operator()(const GatedNorm& g) {
    const int64_t width = g.y.count;
    need(take(g.x, Kind::f32) == width && g.x.is_whole() && g.x.each == 1, "what a gated norm reads");
    need(same(g.gate) == width && made(g.y) == width && g.y.is_whole() && g.groups > 0 && width % g.groups == 0, "a gated norm");
    need(!g.weight || static_cast<int64_t>(g.weight->size()) == width || static_cast<int64_t>(g.weight->size()) == width / g.groups, "a gated norm's weight");
    if (g.weight) {
      check_vector(*g.weight, g.weight->size(), mx::float32, "a gated norm");
    }
  }

 private:
  int64_t same(const View& v) {
    return take(v, Kind::same);
  }

  // Pages are filled by one attention, and read again by later ones.
  void check_pages_of(const Attend& a) {
    need(a.keys.has_value() == a.values.has_value() && a.keys.has_value() == (a.source < 0), "attention with keys or values alone");
    if (a.source >= 0) {
      need(a.source < static_cast<int64_t>(b_.attends.size()) && b_.attends[static_cast<size_t>(a.source)]->keys, "whose pages are read again");
      b_.read_again[static_cast<size_t>(a.source)] = true;
    }
    b_.read_again.push_back(false);
  }

  void make_floats(const View& v, int64_t size) {
    need(made(v, Kind::f32) == size && v.is_whole() && v.each == 1, "a state's output");
  }

  // The columns of a view that is read.
  int64_t take(const View& v, Kind kind) {
    const int64_t count = made(v, kind, false);
    need(v.buffer < 2 || b_.sizes[static_cast<size_t>(v.buffer)] > 0, "a buffer that nothing was written to");
    return count;
  }

  // The columns of a view that is written, for whose rows its buffer gets room.
  int64_t made(const View& v, Kind kind = Kind::same, bool written = true) {
    need(v.kind == kind && v.buffer >= 0 && v.buffer < 64 && v.each > 0 && v.count > 0 && v.first >= 0 && v.first + v.count <= v.width, "a view");
    if (v.buffer == 0) {
      need(v.kind == Kind::same && v.width == b_.hidden && v.each == 1, "a view of the stream");
      return v.count;
    }
    if (v.buffer == 1) {
      need(v.kind == Kind::same && v.width == b_.given && v.each == 1 && !written, "a view of what a step gives");
      return v.count;
    }
    if (b_.sizes.size() <= static_cast<size_t>(v.buffer)) {
      b_.sizes.resize(static_cast<size_t>(v.buffer) + 1, 0);
    }
    auto& size = b_.sizes[static_cast<size_t>(v.buffer)];
    const int64_t bytes = v.each * v.width * (kind == Kind::same ? item_ : 4);
    need(written || bytes <= size || size == 0, "a view of more than was written");
    size = written ? std::max(size, bytes) : size;
    return v.count;
  }

  void keep(std::vector<std::vector<int64_t>> shapes) {
    std::vector<mx::Shape> found;
    for (const auto& shape : shapes) {
      mx::Shape sizes;
      for (int64_t size : shape) {
        sizes.push_back(static_cast<int>(size));
      }
      found.push_back(std::move(sizes));
    }
    b_.states.push_back(std::move(found));
  }

  Blocks& b_;
  const int64_t item_;
  int64_t next_ = 0; // the instruction after the present one
};

} // namespace

Blocks::Blocks(std::vector<Instruction> all, int64_t width, int64_t beside, mx::Dtype type)
    : instructions(std::move(all)), hidden(width), given(beside), dtype(type), sizes(2, 0) {
  if (instructions.empty() || hidden < 1 || given < 0) {
    refuse(kName, "there must be one block at least.");
  }
  Checker checker(*this);
  for (const auto& instruction : instructions) {
    checker.check(instruction);
  }
}

} // namespace mlxinfer::cpu
