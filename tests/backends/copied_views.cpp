#include "tests/backends/copied_views.h"

#include <cstring>
#include <map>
#include <mutex>

#include "backends/cpu/cpu_backend.h"
#include "backends/driver.h"
#include "core/row_offset.h"
#include "losses/inputs.h"
#include "schema/tensors.h"

namespace tileloss::test {
namespace {

using impl::Problem;
using impl::Status;
using impl::TensorSlot;

std::recursive_mutex running;

EmulatedDevice* the_device = nullptr;
EmulatedDevice& chosen() { return *the_device; }

// Elements of a view, as the host has them: begin(i) + k * step for k < count, i < lines.
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

class CopiedCall final : public impl::Call {
 public:
  explicit CopiedCall(const Problem& problem)
      : p_(problem), used_(problem.args.labels, problem.logit.ignore_index, problem.args.mask) {
    if (p_.has_row_state) move(p_.row_state, p_.needs_forward && !p_.has_pair_state);
    if (p_.merges_shards()) merged_ = back_;
    for (const TensorSlot& slot : impl::tensor_slots()) {
      if (slot.vector != nullptr) move(slot, p_.args.*slot.vector);
      if (slot.matrix != nullptr) move(slot, p_.args.*slot.matrix);
    }
    if (p_.has_pair_state) {
      for (tileloss_row_state* s : {&p_.teacher_state, &p_.label_state}) move(*s, false);
      for (double** sums : {&p_.pair_state.divergence, &p_.pair_state.mean}) move(*sums, p_.rows, p_.pass == TILELOSS_FORWARD);
    }
    for (const tileloss_field& field : p_.loss->fields) {
      if (field.type != TILELOSS_FIELD_SCALAR) continue;
      auto* const scalar = reinterpret_cast<tileloss_scalar*>(p_.options.data() + field.offset);
      if (scalar->pointer == nullptr) continue;
      scalar->pointer = static_cast<const float*>(on_device(scalar->pointer, {1, 0, 1, 1, 4}, false));
    }
    std::memcpy(static_cast<void*>(&p_.logit), p_.options.data() + offsetof(impl::CommonOptions, logit), sizeof p_.logit);
    p_.device_type = chosen().backend().device_type();
  }
  ~CopiedCall() override {
    inner_.reset();
    chosen().synchronise();
    for (const auto& [host, piece] : pieces_) chosen().release(piece.data);
  }

  Status begin() { return chosen().begin(p_, &inner_); }
  Status check() override { return inner_->check(); }
  void prepare() override { inner_->prepare(); }
  void couple() override { inner_->couple(); }
  bool keeps_states() const override { return inner_->keeps_states(); }
  // What run.merge works on is the host's.
  Status sweep(std::uint32_t stages) override {
    const bool is_forward = (stages & impl::kForward) != 0;
    if (!is_forward) copy(merged_, false);
    if (Status s = inner_->sweep(stages); !s.ok()) return s;
    if (is_forward) copy(merged_, true);
    return {};
  }
  Status finish() override {
    if (Status s = inner_->finish(); !s.ok()) return s;
    chosen().synchronise();
    Status found = chosen().backend().check_errors(p_.device_index, nullptr);
    if (!found.ok()) return found;
    copy(back_, true);
    return {};
  }

 private:
  struct Piece {
    void* data;
    std::int64_t bytes;
  };
  using Copy = std::function<void(bool is_back)>;

  static void copy(const std::vector<Copy>& copies, bool is_back) {
    for (const Copy& one : copies) chosen().queue([=] { one(is_back); });
    if (!copies.empty()) chosen().synchronise();
  }

  void move(const TensorSlot& slot, tileloss_vector& v) {
    if (!impl::present(v) || v.data == nullptr) return;
    v.data = on_device(v.data, {v.size, v.stride, 1, 1, impl::element_bytes(v.dtype)}, slot.is_output());
  }
  void move(const TensorSlot& slot, tileloss_matrix& m) {
    if (!impl::present(m) || m.data == nullptr) return;
    const tileloss_row_groups& groups = p_.args.row_groups;
    Layout layout = {m.rows, m.row_stride, m.cols, m.col_stride, impl::element_bytes(m.dtype)};
    const std::string_view name = slot.name;
    const std::int64_t group_stride = name == "logits"                                     ? groups.logits_stride
                                      : name == "dlogits"                                  ? groups.dlogits_stride
                                      : name == "teacher_logits" || name == "target_probs" ? groups.teacher_logits_stride
                                                                                           : 0;
    if (groups.rows > 0 && group_stride > 0) {
      layout.group_rows = groups.rows;
      layout.group_stride = group_stride;
    }
    const bool of_rows = slot.shape != impl::Shape::kHead && slot.shape != impl::Shape::kTeacherHead;
    m.data = on_device(m.data, layout, slot.is_output(), of_rows && !slot.is_output());
  }
  void move(tileloss_row_state& s, bool is_output) {
    for (float** array : {&s.max, &s.sum, &s.target, &s.entropy_sum, &s.collision_sum, &s.smoothing_sum})
      move(*array, s.rows, is_output);
    move(s.argmax, s.rows, is_output);
  }
  template <class T>
  void move(T*& array, std::int64_t rows, bool is_output) {
    if (array != nullptr) array = static_cast<T*>(on_device(array, {rows, 1, 1, 1, sizeof(T)}, is_output));
  }

  // Where the view's data lies on the device. It is copied before the call, of inputs with a line a row those in use, and of
  // outputs after it.
  void* on_device(const void* data, const Layout& l, bool is_output, bool of_rows = false) {
    if (l.is_empty()) return const_cast<void*>(data);
    auto* const host = static_cast<std::byte*>(const_cast<void*>(data));
    const auto [low, high] = l.extent();
    const auto [place, is_new] = pieces_.try_emplace(host + low);
    if (is_new) place->second = {chosen().allocate(static_cast<std::size_t>(high - low)), high - low};
    auto* const device = static_cast<std::byte*>(place->second.data) - low;
    const Copy elements = [l, host, device, used = used_, of_rows](bool is_back) {
      for (std::int64_t i = 0; i < l.lines; ++i) {
        if (of_rows && !used.is_used(i)) continue;
        for (std::int64_t k = 0; k < l.count; ++k) {
          const std::int64_t at = l.line(i) + k * l.step * l.element;
          std::memcpy((is_back ? host : device) + at, (is_back ? device : host) + at, static_cast<std::size_t>(l.element));
        }
      }
    };
    chosen().queue([=] { elements(false); });
    if (is_output) back_.push_back(elements);
    return device;
  }

  const std::lock_guard<std::recursive_mutex> lock_{running};
  Problem p_;
  const impl::Labels used_;
  std::map<std::byte*, Piece> pieces_;
  std::vector<Copy> back_, merged_;  // after the call; around run.merge
  std::unique_ptr<impl::Call> inner_;
};

class CopiedViews final : public impl::Backend {
 public:
  tileloss_device_type device_type() const override { return TILELOSS_CPU; }
  const char* name() const override { return cpu().name(); }
  Status plan(const Problem& problem, const tileloss_plan_options& wishes, const tileloss_executor* executor,
              tileloss_plan* plan) const override {
    return cpu().plan(problem, wishes, executor, plan);
  }
  Status check_plan(const tileloss_plan& plan) const override { return cpu().check_plan(plan); }
  Status begin(const Problem& problem, const tileloss_plan& /*plan*/, const tileloss_run& /*run*/,
               std::unique_ptr<impl::Call>* call) const override {
    auto copied = std::make_unique<CopiedCall>(problem);
    if (Status s = copied->begin(); !s.ok()) return s;
    *call = std::move(copied);
    return {};
  }
  Status set_identity(const tileloss_row_state& state) const override { return cpu().set_identity(state); }
  Status merge(tileloss_row_state* into, const tileloss_row_state& from) const override { return cpu().merge(into, from); }
  std::vector<impl::PlanFact> describe(const tileloss_plan& plan) const override { return cpu().describe(plan); }

 private:
  static const impl::Backend& cpu() { return impl::cpu::cpu_backend(); }
};

}  // namespace

void take_the_cpus_place(EmulatedDevice* device) {
  the_device = device;
  static const CopiedViews backend;
  impl::add_backend(&backend);
}

}  // namespace tileloss::test
