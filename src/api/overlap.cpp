#include <numeric>
#include <string_view>
#include <vector>

#include "api/arguments.h"

namespace tileloss::impl::api {
namespace {

using std::to_string;

// Where a tensor lies: `count` spans of bytes, each `stride` after the one before it.
struct Region {
  const char* name;
  std::uintptr_t begin = 0;
  std::int64_t span = 0, stride = 0, count = 0;
  bool is_output = false;

  std::uintptr_t end() const { return begin + static_cast<std::uintptr_t>((count - 1) * stride + span); }
};

// The pointer's name in an error.
std::string member_of(const Region& r) {
  const std::string name(r.name);
  return name.starts_with("row_state") ? name : name + ".data";
}

Region region(const char* name, const tileloss_vector& v, bool is_output) {
  const std::int64_t bytes = element_bytes(v.dtype);
  return {name, reinterpret_cast<std::uintptr_t>(v.data), bytes, v.size > 1 ? v.stride * bytes : 0, v.size, is_output};
}

// The dimension with the smaller stride is a span.
Region region(const char* name, const tileloss_matrix& m, bool is_output) {
  const std::int64_t bytes = element_bytes(m.dtype);
  const std::int64_t row_stride = m.rows > 1 ? m.row_stride : 0, col_stride = m.cols > 1 ? m.col_stride : 0;
  Region r{name, reinterpret_cast<std::uintptr_t>(m.data), 0, 0, 0, is_output};
  if (m.rows == 0) return r;
  const bool by_rows = row_stride >= col_stride;
  r.span = ((by_rows ? (m.cols - 1) * col_stride : (m.rows - 1) * row_stride) + 1) * bytes;
  r.stride = (by_rows ? row_stride : col_stride) * bytes;
  r.count = by_rows ? m.rows : m.cols;
  return r;
}

// One span that holds all that a matrix in row groups does.
Region region_of_groups(const char* name, const tileloss_matrix& m, std::int64_t group_rows, std::int64_t group_stride,
                        bool is_output) {
  Region r = region(name, m, is_output);
  if (group_rows == 0 || r.count == 0) return r;
  r.span = (m.rows / group_rows - 1) * group_stride * element_bytes(m.dtype) + (group_rows - 1) * r.stride + r.span;
  r.count = 1;
  r.stride = 0;
  return r;
}

// Exact for equal strides, as of two columns of one array; otherwise it may see an overlap where spans take turns.
bool meet(const Region& a, const Region& b) {
  if (a.count == 0 || b.count == 0 || a.begin >= b.end() || b.begin >= a.end()) return false;
  const std::int64_t period = std::gcd(a.stride, b.stride);
  if (period == 0) return true;
  const auto distance = static_cast<std::int64_t>(b.begin - a.begin) % period;
  const std::int64_t after = distance < 0 ? distance + period : distance;  // from a span of a to the next one of b
  return after < a.span || period - after < b.span;
}

std::vector<Region> regions(const Problem& p) {
  const tileloss_args& a = p.args;
  const tileloss_row_groups& g = a.row_groups;
  const bool writes_rows = p.pass != TILELOSS_BACKWARD;  // which leaves the forward's row outputs alone
  std::vector<Region> all;
  const auto add = [&](Region r) {
    if (r.count > 0 && r.begin != 0) all.push_back(std::move(r));  // null: allowed where there are no rows
  };
  for (const TensorSlot& slot : tensor_slots()) {
    if (!present(a, slot)) continue;
    const bool is_written = slot.is_output() && (writes_rows || slot.role == TILELOSS_ROLE_GRADIENT);
    if (slot.vector != nullptr) {
      add(region(slot.name, a.*slot.vector, is_written));
    } else if (slot.shape == Shape::kLogits) {
      const std::int64_t stride = is_written                              ? g.dlogits_stride
                                  : slot.matrix == &tileloss_args::logits ? g.logits_stride
                                                                          : g.teacher_logits_stride;
      add(region_of_groups(slot.name, a.*slot.matrix, g.rows, stride, is_written));
    } else {
      add(region(slot.name, a.*slot.matrix, is_written));
    }
  }
  for (const StateArray& array : state_arrays()) {
    const tileloss_row_state& s = p.row_state;
    const auto values = array.member != nullptr
                            ? tileloss_make_vector(s.*array.member, TILELOSS_FLOAT32, p.rows * array.per_row(s))
                            : tileloss_make_vector(s.argmax, TILELOSS_INT64, p.rows);
    if (p.has_row_state && values.data != nullptr) add(region(array.name, values, p.needs_forward));
  }
  return all;
}

Status check_in_place(const Problem& p) {
  const tileloss_args& a = p.args;
  const tileloss_row_groups& g = a.row_groups;
  if (g.rows > 0 && g.dlogits_stride != g.logits_stride && p.rows > g.rows) {
    return expected("row_groups.dlogits_stride", "the logits', " + to_string(g.logits_stride) + ", when it is written over them",
                    to_string(g.dlogits_stride));
  }
  if (a.dlogits.row_stride != a.logits.row_stride && p.rows > 1) {
    return expected("dlogits.row_stride", "the logits', " + to_string(a.logits.row_stride) + ", when it is written over them",
                    to_string(a.dlogits.row_stride));
  }
  return {};
}

}  // namespace

Status check_reach(const std::string& name, const Problem& p, const Backend& backend, const void* pointer) {
  const std::string found = backend.out_of_reach(pointer, p.device_index);
  if (found.empty()) return {};
  return expected(name, std::string("memory of ") + backend.name() + ":" + to_string(p.device_index), found);
}

Status check_memory(const Problem& p, const Backend& backend) {
  const tileloss_args& a = p.args;
  const bool is_in_place = present(a.dlogits) && a.dlogits.data == a.logits.data && p.rows > 0;
  if (is_in_place) {
    if (Status s = check_in_place(p); !s.ok()) return s;
  }
  const std::vector<Region> all = regions(p);
  for (const Region& r : all) {
    if (Status s = check_reach(member_of(r), p, backend, reinterpret_cast<const void*>(r.begin)); !s.ok()) return s;
  }
  for (const tileloss_field& field : p.loss->fields) {
    const float* const number = pointer_of(field, p.options.data());
    if (number == nullptr) continue;
    if (Status s = check_reach(field.name, p, backend, number); !s.ok()) return s;
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const Region &output = all[i].is_output ? all[i] : all[j], &other = all[i].is_output ? all[j] : all[i];
      if (!output.is_output || !meet(output, other)) continue;
      if (output.name == std::string_view("dlogits") && other.name == std::string_view("logits")) {
        if (is_in_place) continue;
        return expected("dlogits.data", "the logits' own, or a buffer apart from them", "one that overlaps them");
      }
      return expected(member_of(output), std::string("a buffer apart from ") + other.name, "one that overlaps it");
    }
  }
  return {};
}

}  // namespace tileloss::impl::api
