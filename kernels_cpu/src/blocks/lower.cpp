#include "blocks/lower.h"

namespace mlxinfer::cpu {
namespace {

Float float_type(mx::Dtype dtype) {
  return dtype == mx::float32 ? Float::f32 : dtype == mx::bfloat16 ? Float::bf16 : Float::f16;
}

const float* floats(const mx::array& a) {
  return a.data<float>();
}
const float* floats(const std::optional<mx::array>& a) {
  return a ? a->data<float>() : nullptr;
}

const void* weight_of(const std::optional<Norm>& norm) {
  return norm ? norm->weight.data<char>() : nullptr;
}
float eps_of(const std::optional<Norm>& norm) {
  return norm ? norm->eps : 0.0f;
}

} // namespace

Plan::Plan(
    const Blocks& blocks,
    int64_t rows,
    void* stream,
    const void* given,
    std::vector<AttentionWork> attention,
    std::vector<StatePlaces> states,
    std::shared_ptr<const Stretches> stretches,
    mx::cpu::CommandEncoder& encoder)
    : float_(float_type(blocks.dtype)), rows_(rows), buffers_{static_cast<char*>(stream), static_cast<char*>(const_cast<void*>(given))},
      attention_(std::move(attention)), states_(std::move(states)), stretches_(std::move(stretches)), encoder_(encoder) {
  for (size_t i = 2; i < blocks.sizes.size(); ++i) {
    mx::array a({static_cast<int>(rows), static_cast<int>(blocks.sizes[i])}, mx::uint8, nullptr, {});
    allocate(a);
    buffers_.push_back(a.data<char>());
    encoder.add_temporary(std::move(a));
  }
  for (const auto& instruction : blocks.instructions) {
    const bool repeated = in_wave_ > 0;
    std::visit(*this, instruction);
    if (repeated) { // every instruction is one piece of work
      wave_->all.push_back(std::move(work_.back()));
      work_.pop_back();
      --in_wave_;
    }
  }
}

char* Plan::place(const View& v) const {
  return buffers_[static_cast<size_t>(v.buffer)] + v.first * (v.kind == Kind::same ? item_bytes(float_) : 4);
}

Rows Plan::rows(const View& v) const {
  return {place(v), rows_ * v.each, v.count, v.width};
}

Rows Plan::rows(const std::optional<View>& v) const {
  return v ? rows(*v) : Rows{};
}

std::span<int32_t> Plan::integers(const View& v) const {
  return {reinterpret_cast<int32_t*>(place(v)), static_cast<size_t>(rows_ * v.each)};
}

const int32_t* Plan::experts(const std::optional<View>& v) const {
  return v ? integers(*v).data() : nullptr;
}

// 0 to each - 1 for every row of the step.
const int32_t* Plan::numbers(int64_t each) {
  if (const auto known = numbers_.find(each); known != numbers_.end()) {
    return known->second;
  }
  mx::array a({static_cast<int>(rows_), static_cast<int>(each)}, mx::int32, nullptr, {});
  allocate(a);
  int32_t* to = a.data<int32_t>();
  for (int64_t i = 0; i < rows_ * each; ++i) {
    to[i] = static_cast<int32_t>(i % each);
  }
  encoder_.add_temporary(std::move(a));
  return numbers_[each] = to;
}

void Plan::operator()(const Multiply& m) {
  const Projection& p = m.projection;
  Product product{};
  product.layout = p.layout;
  product.weights = p.data.data<uint8_t>();
  product.precision = p.precision;
  product.dtype = float_;
  product.x = rows(m.x);
  product.rows = rows_ * m.y.each;
  product.x_repeats = m.y.each / m.x.each;
  product.norm = weight_of(m.norm);
  product.eps = eps_of(m.norm);
  product.experts = m.experts ? experts(m.experts) : p.data.ndim() == 3 ? numbers(m.y.each) : nullptr;
  product.expert_count = p.data.ndim() == 3 ? p.data.shape(0) : 1;
  product.bias = p.bias ? p.bias->data<char>() : nullptr;
  product.residual = rows(m.onto);
  product.gate = m.gate;
  product.y = place(m.y);
  work_.push_back(product);
}

void Plan::operator()(const NormView& n) {
  work_.push_back(NormRows{rows(n.x), n.norm.weight.data<char>(), n.norm.eps, rows(n.onto), place(n.y), float_, n.y.width, n.norm.centring});
}

void Plan::operator()(const Attend& a) {
  AttentionWork work = std::move(attention_[next_attention_++]);
  const int64_t item = item_bytes(float_);
  auto heads = [&](const View& v, int64_t dim, int64_t step) {
    return Heads{place(v), v.width * item, step * item, dim, static_cast<int>(float_)};
  };
  work.queries = heads(a.queries, work.keys.dim, a.query_step);
  if (a.keys && a.values) {
    work.new_keys = heads(*a.keys, work.keys.dim, work.keys.dim);
    work.new_values = heads(*a.values, work.values.dim, work.values.dim);
  }
  if (a.turned) {
    work.queries.turned = place(*a.turned);
    work.queries.turned_row_stride = a.turned->width * item;
    work.queries.turned_head_stride = a.turned_step * item;
  }
  work.queries.still = work.new_keys.still = a.still;
  work.queries.gain = floats(a.query_gain);
  work.queries.norm = weight_of(a.query_norm);
  work.queries.eps = eps_of(a.query_norm);
  work.new_keys.norm = weight_of(a.key_norm);
  work.new_keys.eps = eps_of(a.key_norm);
  work.new_values.norm = weight_of(a.value_norm);
  work.new_values.eps = eps_of(a.value_norm);
  work.queries.rotation = work.new_keys.rotation = work.rotation.get();
  work.heads_per_kv = a.y.count / work.values.dim / work.keys.kv_heads;
  work.scale = a.scale;
  work.softcap = a.softcap;
  work.sinks = floats(a.sinks);
  work.out = place(a.y);
  work.out_item_size = item;
  work_.push_back(std::move(work));
}

void Plan::operator()(const ChooseExperts& c) {
  work_.push_back(RouteRows{c.route, floats(c.bias), floats(c.gains), rows(c.logits), float_, reinterpret_cast<int32_t*>(place(c.experts)),
                            reinterpret_cast<float*>(place(c.shares))});
}

void Plan::operator()(const AddRows& a) {
  const float* shares = a.shares ? reinterpret_cast<const float*>(place(*a.shares)) : nullptr;
  work_.push_back(SumRows{rows(a.x), a.x.each, shares, rows(a.gate), a.factor, rows(a.onto), place(a.y), a.y.width, float_});
}

void Plan::operator()(const GateView& g) {
  work_.push_back(GateRows{g.unit, g.alpha, g.limit, rows(g.x), rows(g.gate), g.parts, g.gate_step, experts(g.experts), place(g.y), g.y.width, float_});
}

void Plan::operator()(const ExpertWaves& w) {
  wave_ = std::make_shared<WorkList>();
  in_wave_ = w.count;
  const std::span<const int32_t> expected = w.expected ? integers(*w.expected) : std::span<int32_t>{};
  work_.push_back(WaveWork{w.pool, integers(w.experts), expected, integers(w.slots), wave_});
}

void Plan::operator()(const Delta& d) {
  const StatePlaces& s = states_[next_state_++];
  const int64_t channels = d.qkv.count;
  work_.push_back(DeltaWork{
      stretches_, d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.decays(), {floats(d.convolution), nullptr, channels, d.taps, s.from[0], s.to[0]},
      floats(d.decay), floats(d.decay_bias), s.from[1], s.to[1], rows(d.qkv), rows(d.beta), rows(d.rate), float_, reinterpret_cast<float*>(place(d.y))});
}

void Plan::operator()(const Mamba& m) {
  const StatePlaces& s = states_[next_state_++];
  const int64_t channels = m.mixed.count;
  work_.push_back(MambaWork{
      stretches_, m.heads, m.dim, m.size, m.groups, {floats(m.convolution), floats(m.bias), channels, m.taps, s.from[0], s.to[0]}, floats(m.decay),
      floats(m.skip), floats(m.step_bias), m.least, m.most, s.from[1], s.to[1], rows(m.mixed), rows(m.steps), float_,
      reinterpret_cast<float*>(place(m.y))});
}

void Plan::operator()(const ShortConvolution& c) {
  const StatePlaces& s = states_[next_state_++];
  work_.push_back(ShortConvWork{
      stretches_, {floats(c.convolution), floats(c.bias), c.x.count, c.taps, s.from[0], s.to[0]}, rows(c.before), rows(c.after), rows(c.x), float_,
      place(c.y)});
}

void Plan::operator()(const GatedNorm& g) {
  const bool shared = g.weight && static_cast<int64_t>(g.weight->size()) != g.y.count;
  work_.push_back(GatedRows{
      reinterpret_cast<const float*>(place(g.x)), rows(g.gate), floats(g.weight), g.eps, g.normed, g.first, g.silu, shared, g.groups, float_, place(g.y)});
}

namespace {

void run_one(const Product& product) {
  multiply(product);
}
template <typename T>
void run_one(const T& work) {
  work.run();
}

} // namespace

void WaveWork::run() const {
  bool more = true;
  for (int64_t wave = 0; more; ++wave) {
    more = pool->next(experts, expected, wave, slots);
    for (const auto& part : each->all) {
      cpu::run(part);
    }
  }
}

void run(const Work& work) {
  std::visit([](const auto& w) { run_one(w); }, work);
}

} // namespace mlxinfer::cpu
