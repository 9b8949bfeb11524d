#include "backends/device/copied_views.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "core/row_offset.h"
#include "losses/inputs.h"
#include "schema/tensors.h"

namespace tileloss::impl::device {
namespace {

std::recursive_mutex running;

// Elements of a view, as the host has them: line(i) + k * step for k < count, i < lines.
struct Layout {
  std::int64_t lines = 0, line_stride = 0, count = 0, step = 0, element = 0;
  std::int64_t group_rows = 0, group_stride = 0;

  std::int64_t line(std::int64_t i) const { return impl::row_offset(i, line_stride, group_rows, group_stride) * element; }
  bool is_empty() const { return lines == 0 || count == 0; }
  // Offsets in bytes from the view's data.
  std::pair<std::int64_t, std::int64_t> extent() const {
    std::int64_t low = 0, high = 0;
    for (std::int64_t i = 0; i < lines; ++i) {
      const std::int64_t first = line(i), last = first + (count - 1) * step * element;
      low = std::min({low, first, last});
      high = std::max({high, first, last});
    }
    return {low, high + element};
  }
};

// A call's views, and where they lie on the device.
class CopiedCall final : public Call {
 public:
  CopiedCall(const Problem& problem, const Backend& device, std::int32_t device_index)
      : p_(problem),
        device_(device),
        memory_(*device.memory()),
        used_(p_.args.labels, p_.logit.ignore_index, p_.args.mask, p_.args.labels_per_row) {
    p_.device_type = device.device_type();
    p_.device_index = device_index;
    if (p_.has_row_state) move(p_.row_state, p_.needs_forward);
    if (p_.merges_shards()) merged_ = back_;
    for (const TensorSlot& slot : tensor_slots()) {
      if (slot.vector != nullptr) move(slot, p_.args.*slot.vector);
      if (slot.matrix != nullptr) move(slot, p_.args.*slot.matrix);
    }
    if (p_.has_pair_state) {
      for (tileloss_row_state* s : {&p_.teacher_state, &p_.label_state}) move(*s, false);
      for (double** sums : {&p_.pair_state.divergence, &p_.pair_state.mean}) move(*sums, p_.rows, p_.gives_sums);
    }
    for (const tileloss_field& field : p_.loss->fields) {
      if (field.type != TILELOSS_FIELD_SCALAR) continue;
      auto* const scalar = reinterpret_cast<tileloss_scalar*>(p_.options.data() + field.offset);
      if (scalar->pointer == nullptr) continue;
      scalar->pointer = static_cast<const float*>(on_device(scalar->pointer, {1, 0, 1, 1, 4}, false));
    }
    std::memcpy(static_cast<void*>(&p_.logit), p_.options.data() + offsetof(CommonOptions, logit), sizeof p_.logit);
  }
  ~CopiedCall() override {
    inner_.reset();
    (void)memory_.synchronise(p_.device_index);
    for (const auto& [host, piece] : pieces_) memory_.release(p_.device_index, piece.data);
  }

  // `plan`: the device's own; null: it makes one, with these hints.
  Status begin(const tileloss_plan* plan, const tileloss_plan_options& hints) {
    if (!status_.ok()) return status_;
    tileloss_plan own{};
    if (plan == nullptr) {
      if (Status s = device_.plan(p_, hints, nullptr, &own); !s.ok()) return s;
    }
    return device_.begin(p_, plan == nullptr ? own : *plan, {}, &inner_);
  }
  Status check() override { return inner_->check(); }
  void prepare() override { inner_->prepare(); }
  void couple() override { inner_->couple(); }
  bool keeps_states() const override { return inner_->keeps_states(); }
  // What run.merge works on is the host's.
  Status sweep(std::uint32_t stages) override {
    const bool is_forward = (stages & kForward) != 0;
    if (!is_forward) copy(merged_, false);
    if (Status s = inner_->sweep(stages); !s.ok()) return s;
    if (is_forward) copy(merged_, true);
    return status_;
  }
  Status finish() override {
    if (Status s = inner_->finish(); !s.ok()) return s;
    keep(memory_.synchronise(p_.device_index));
    keep(device_.check_errors(p_.device_index, nullptr));
    if (status_.ok()) copy(back_, true);
    return status_;
  }

 private:
  struct Piece {
    void* data;
    std::int64_t bytes;
  };
  struct Copy {
    std::byte *host, *device;
    Layout layout;
    bool only_used;
  };

  void keep(Status s) {
    if (status_.ok()) status_ = std::move(s);
  }

  void copy(const std::vector<Copy>& copies, bool is_back) {
    for (const Copy& one : copies) copy(one, is_back);
    if (!copies.empty()) keep(memory_.synchronise(p_.device_index));
  }
  // Elements that lie side by side in one go, and nothing between them.
  void copy(const Copy& c, bool is_back) {
    const Layout& l = c.layout;
    std::int64_t begin = 0, end = 0;
    const auto flush = [&] {
      if (end == begin) return;
      std::byte *const on_host = c.host + begin, *const on_device = c.device + begin;
      keep(memory_.copy(p_.device_index, is_back ? on_host : on_device, is_back ? on_device : on_host,
                        static_cast<std::size_t>(end - begin)));
    };
    for (std::int64_t i = 0; i < l.lines; ++i) {
      if (c.only_used && !used_.is_used(i)) continue;
      for (std::int64_t k = 0; k < l.count; k += l.step == 1 ? l.count : 1) {
        const std::int64_t at = l.line(i) + k * l.step * l.element;
        if (at != end) {
          flush();
          begin = end = at;
        }
        end += l.element * (l.step == 1 ? l.count : 1);
      }
    }
    flush();
  }

  void move(const TensorSlot& slot, tileloss_vector& v) {
    if (!present(v) || v.data == nullptr) return;
    v.data = on_device(v.data, {v.size, v.stride, 1, 1, element_bytes(v.dtype)}, slot.is_output());
  }
  void move(const TensorSlot& slot, tileloss_matrix& m) {
    if (!present(m) || m.data == nullptr) return;
    const tileloss_row_groups& groups = p_.args.row_groups;
    Layout layout = {m.rows, m.row_stride, m.cols, m.col_stride, element_bytes(m.dtype)};
    const std::string_view name = slot.name;
    const std::int64_t group_stride = name == "logits"                                     ? groups.logits_stride
                                      : name == "dlogits"                                  ? groups.dlogits_stride
                                      : name == "teacher_logits" || name == "target_probs" ? groups.teacher_logits_stride
                                                                                           : 0;
    if (groups.rows > 0 && group_stride > 0) {
      layout.group_rows = groups.rows;
      layout.group_stride = group_stride;
    }
    const bool is_head = slot.shape == Shape::kHead || slot.shape == Shape::kTeacherHead || slot.shape == Shape::kHeadR;
    if (is_head && m.col_stride != 1) layout = {m.cols, m.col_stride, m.rows, m.row_stride, layout.element};
    m.data = on_device(m.data, layout, slot.is_output(), !is_head && !slot.is_output());
  }
  void move(tileloss_row_state& s, bool is_output) {
    for (float** array : {&s.max, &s.sum, &s.label_logit, &s.entropy_sum, &s.collision_sum, &s.smoothing_sum, &s.allowed_count,
                          &s.allowed_weight})
      move(*array, s.rows, is_output);
    if (s.label_logits != nullptr) move(s.label_logits, s.rows * s.labels_per_row, is_output);
    move(s.argmax, s.rows, is_output);
  }
  template <class T>
  void move(T*& array, std::int64_t rows, bool is_output) {
    if (array != nullptr) array = static_cast<T*>(on_device(array, {rows, 1, 1, 1, sizeof(T)}, is_output));
  }

  // Where the view's data lies on the device. It is copied before the call, of inputs with a line a row those in use, and of
  // outputs after it.
  void* on_device(const void* data, const Layout& l, bool is_output, bool only_used = false) {
    if (l.is_empty() || !status_.ok()) return const_cast<void*>(data);
    auto* const host = static_cast<std::byte*>(const_cast<void*>(data));
    const auto [low, high] = l.extent();
    const auto [place, is_new] = pieces_.try_emplace(host + low);
    if (is_new) {
      place->second = {nullptr, high - low};
      keep(memory_.allocate(p_.device_index, static_cast<std::size_t>(high - low), &place->second.data));
      if (!status_.ok()) return const_cast<void*>(data);
    }
    auto* const device = static_cast<std::byte*>(place->second.data) - low;
    const Copy elements = {host, device, l, only_used};
    copy(elements, false);
    if (is_output) back_.push_back(elements);
    return device;
  }

  const std::lock_guard<std::recursive_mutex> lock_{running};
  Problem p_;
  const Backend& device_;
  DeviceMemory& memory_;
  const Labels used_;
  std::map<std::byte*, Piece> pieces_;
  std::vector<Copy> back_, merged_;  // after the call; around run.merge
  Status status_;                    // the first that failed of what copies
  std::unique_ptr<Call> inner_;
};

class CopiedViews final : public Backend {
 public:
  CopiedViews(const Backend& device, std::int32_t device_index, const Backend& planner,
              tileloss_plan_options (*hints)(const Problem&))
      : device_(device), device_index_(device_index), planner_(planner), hints_(hints) {}

  tileloss_device_type device_type() const override { return TILELOSS_CPU; }
  const char* name() const override { return planner_.name(); }
  Status plan(const Problem& problem, const tileloss_plan_options& hints, const tileloss_executor* executor,
              tileloss_plan* plan) const override {
    Problem there = problem;
    there.device_type = planner_.device_type();
    there.device_index = is_own() ? device_index_ : 0;
    return planner_.plan(there, hints, executor, plan);
  }
  Status check_plan(const tileloss_plan& plan) const override { return planner_.check_plan(plan); }
  // The workspace is the device's: what the caller gives is the host's.
  Status begin(const Problem& problem, const tileloss_plan& plan, const tileloss_run& /*run*/,
               std::unique_ptr<Call>* call) const override {
    auto copied = std::make_unique<CopiedCall>(problem, device_, device_index_);
    if (Status s = copied->begin(is_own() ? &plan : nullptr, hints_ == nullptr ? tileloss_plan_options{} : hints_(problem));
        !s.ok())
      return s;
    *call = std::move(copied);
    return {};
  }
  Status set_identity(const tileloss_row_state& state) const override { return cpu_.set_identity(state); }
  Status merge(tileloss_row_state* into, const tileloss_row_state& from) const override { return cpu_.merge(into, from); }
  Status scale_gradient(const tileloss_matrix& gradient, const float* factor, const tileloss_run& run) const override {
    return cpu_.scale_gradient(gradient, factor, run);
  }
  std::vector<PlanFact> describe(const tileloss_plan& plan) const override { return planner_.describe(plan); }

 private:
  bool is_own() const { return &planner_ == &device_; }

  const Backend& device_;
  const std::int32_t device_index_;
  const Backend& planner_;
  tileloss_plan_options (*const hints_)(const Problem&);
  const Backend& cpu_ = *find_backend(TILELOSS_CPU);  // who had the place before
};

}  // namespace

void take_the_cpus_place(const Backend& device, std::int32_t device_index, const Backend& planner,
                         tileloss_plan_options (*hints)(const Problem&)) {
  static const CopiedViews backend(device, device_index, planner, hints);
  add_backend(&backend);
}

}  // namespace tileloss::impl::device
