#include "judge/strict/guarded_args.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "support/format.h"

namespace tileloss::tools {
namespace {

// Odd, so that the rows of any dtype start at every alignment.
constexpr int64_t kGapElements = 13;

// Byte i of memory that nobody has written: 0x7fa5 in every 16 bits is a NaN in float32, bfloat16 and float16.
constexpr unsigned char unwritten_byte(size_t i) { return i % 2 == 0 ? 0xa5 : 0x7f; }

void fill_unwritten(unsigned char* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) data[i] = unwritten_byte(i);
}

// `offset`: of `data` from the tensor's start.
bool is_unwritten(const unsigned char* data, size_t bytes, size_t offset) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != unwritten_byte(offset + i)) return false;
  }
  return true;
}

size_t row_bytes(const TensorView& view) { return static_cast<size_t>(view.cols) * view.element; }
size_t stride_bytes(const TensorView& view) { return static_cast<size_t>(view.stride) * view.element; }

size_t group_bytes(const TensorView& view) { return static_cast<size_t>(view.group_stride) * view.element; }

// In bytes from the tensor's start.
size_t row_offset(const TensorView& view, int64_t row) {
  if (view.group_rows == 0) return static_cast<size_t>(row) * stride_bytes(view);
  return static_cast<size_t>(row / view.group_rows) * group_bytes(view) +
         static_cast<size_t>(row % view.group_rows) * stride_bytes(view);
}

// The row whose start is the last one up to there.
int64_t row_at(const TensorView& view, size_t offset) {
  const size_t stride = std::max(stride_bytes(view), view.element);
  if (view.group_rows == 0) return static_cast<int64_t>(offset / stride);
  const auto in_group = static_cast<int64_t>(offset % group_bytes(view) / stride);
  return static_cast<int64_t>(offset / group_bytes(view)) * view.group_rows + std::min(in_group, view.group_rows - 1);
}

size_t extent(const TensorView& view) { return view.rows == 0 ? 0 : row_offset(view, view.rows - 1) + row_bytes(view); }

unsigned char* row_of(const TensorView& view, int64_t row) {
  return static_cast<unsigned char*>(view.data) + row_offset(view, row);
}

// As few groups as there can be; at least two.
int64_t rows_of_a_group(int64_t rows) {
  for (int64_t groups = 2; groups <= rows; ++groups) {
    if (rows % groups == 0) return rows / groups;
  }
  return 0;
}

// So many elements that a guard page fits between two pieces of `bytes` bytes, each flush with a page.
int64_t elements_apart(size_t bytes, size_t element) {
  const size_t page = GuardBuffer::page_bytes();
  return static_cast<int64_t>(((bytes + page - 1) / page + 1) * page / element);
}

std::string place(const TensorView& view, int64_t row, int64_t column) {
  if (view.is_transposed) std::swap(row, column);
  return view.is_matrix ? formatted("row {}, column {}", row, column) : formatted("element {} of {}", row, view.rows);
}

std::string bits(const unsigned char* element, size_t bytes) {
  std::string text = "0x";
  for (size_t i = bytes; i-- > 0;) text += formatted("{:02x}", element[i]);
  return text;
}

std::string overrun(const TensorView& view, int64_t row, size_t elements, bool past) {
  const std::string whose = view.is_matrix ? formatted("{} {}, ", view.is_transposed ? "column" : "row", row) : "";
  const char* unit = view.element == 1 ? "byte" : "element";
  const std::string side = !past            ? "before the start"
                           : view.is_matrix ? "past the end"
                                            : formatted("past the end of {}", view.rows);
  return formatted("{} overrun: {}{} {}{} {}", view.name, whose, elements, unit, elements == 1 ? "" : "s", side);
}

const char* access_name(MemoryFault::Access access) {
  return access == MemoryFault::kRead ? "read" : access == MemoryFault::kWrite ? "write" : "access";
}

}  // namespace

std::string GuardLayout::name() const {
  const char* apart = rows == Rows::kGaps     ? ", gaps between rows"
                      : rows == Rows::kApart  ? ", rows apart"
                      : rows == Rows::kGroups ? ", groups of rows"
                                              : "";
  return formatted("flush {}{}", flush == Flush::kRight ? "right" : "left", apart);
}

bool GuardedArgs::is_of_use(const tileloss_args& given, GuardLayout layout) {
  return layout.rows != GuardLayout::Rows::kGroups || (given.logits.dtype != TILELOSS_NONE && given.logits.rows > 1);
}

GuardedArgs::GuardedArgs(tileloss_pass pass, const tileloss_args& given, GuardLayout layout, bool adds)
    : pass_(pass), layout_(layout), args_(given) {
  if (given.row_state != nullptr) {
    row_state_ = std::make_unique<tileloss_row_state>(*given.row_state);
    args_.row_state = row_state_.get();
  }
  const auto place = [&](TensorView& view) {
    const TensorView source = view;
    if (is_in_place(given) && source.use == SlotUse::kOutput && source.is_matrix) {
      region_of_tensor_.push_back(0);
      view.data = regions_.front().view.data;
      view.stride = regions_.front().view.stride;
      view.group_rows = regions_.front().view.group_rows;
      view.group_stride = regions_.front().view.group_stride;
      return;
    }
    region_of_tensor_.push_back(regions_.size());
    host(source, view);
  };
  for_each_tensor(args_, pass, place, adds);
}

bool GuardedArgs::is_apart(const TensorView& view) const {
  return view.is_matrix && layout_.rows == GuardLayout::Rows::kApart && view.rows <= kMaxApartRows;
}

bool GuardedArgs::is_break(const TensorView& view, int64_t row) const {
  if (row == 0 || row >= view.rows) return false;
  return view.group_rows > 0 ? row % view.group_rows == 0 : is_apart(view);
}

void GuardedArgs::place_rows(TensorView& view) const {
  view.group_rows = view.group_stride = 0;
  if (!view.is_matrix) return;
  view.stride = view.cols;
  if (is_apart(view)) {
    view.stride = elements_apart(row_bytes(view), view.element);
  } else if (layout_.rows == GuardLayout::Rows::kGroups) {
    if (!view.may_be_grouped) return;
    view.group_rows = rows_of_a_group(view.rows);
    view.group_stride = elements_apart(static_cast<size_t>(view.group_rows) * row_bytes(view), view.element);
  } else if (layout_.rows != GuardLayout::Rows::kAdjoining) {
    view.stride += kGapElements;
  }
}

void GuardedArgs::host(const TensorView& given, TensorView& view) {
  place_rows(view);
  GuardBuffer buffer(extent(view), layout_.flush);
  view.data = buffer.data();
  fill_unwritten(buffer.as<unsigned char>(), buffer.bytes());
  if (given.use == SlotUse::kInput || given.is_added_to) {
    for (int64_t i = 0; i < view.rows; ++i) std::memcpy(row_of(view, i), row_of(given, i), row_bytes(view));
  }
  const bool is_shared = view.is_matrix && is_in_place(args_) && given.data == args_.dlogits.data;  // not the teacher's logits
  if (is_shared) view.name = "dlogits (in place)";
  const bool is_writable = given.use == SlotUse::kOutput || is_shared;
  if (!is_writable) buffer.make_read_only();
  const bool is_written = is_writable && (pass_ != TILELOSS_BACKWARD || view.is_gradient || is_shared);
  regions_.push_back({view, std::move(buffer), is_writable, is_written});
  insert_guard_pages(regions_.back());
}

// What touches the page ends (flush right) or starts (flush left) with a page, as all of them do: the stride is whole pages.
void GuardedArgs::insert_guard_pages(Region& region) {
  for (int64_t i = 1; i < region.view.rows; ++i) {
    if (!is_break(region.view, i)) continue;
    const size_t start = row_offset(region.view, i);
    const size_t previous_end = row_offset(region.view, i - 1) + row_bytes(region.view);
    region.buffer.make_guard_page(layout_.flush == Flush::kRight ? previous_end : start - GuardBuffer::page_bytes());
  }
}

void GuardedArgs::hide_sets(const std::vector<int64_t>& rows) {
  for (Region& region : regions_) {
    if (region.view.name != std::string_view("allowed") || !is_apart(region.view) || region.view.rows == 1) continue;
    for (const int64_t row : rows) region.buffer.hide(row_offset(region.view, row), row_bytes(region.view));
  }
}

tileloss_run GuardedArgs::add_workspace(const tileloss_plan& plan) {
  tileloss_run run;
  tileloss_run_init(&run);
  GuardBuffer buffer(static_cast<size_t>(plan.workspace_bytes), layout_.flush);
  fill_unwritten(buffer.as<unsigned char>(), buffer.bytes());
  run.workspace = buffer.data();
  run.workspace_bytes = buffer.bytes();
  const TensorView view{"workspace", buffer.data(), 1, plan.workspace_bytes, 1, 1, false, SlotUse::kOutput};
  regions_.push_back({view, std::move(buffer), true, false});
  return run;
}

std::vector<std::string> GuardedArgs::compare(const tileloss_args& expected) const {
  std::vector<std::string> findings;
  const auto add = [&](const std::string& finding) {
    if (!finding.empty()) findings.push_back(finding + ", " + layout_.name());
  };
  tileloss_args expected_args = expected;
  size_t tensor = 0;
  for_each_tensor(expected_args, pass_, [&](TensorView& view) {
    const Region& region = regions_[region_of_tensor_[tensor++]];
    if (view.use == SlotUse::kOutput) add(compare_rows(region, view));
  });
  for (const Region& region : regions_) {
    if (region.is_writable && region.view.is_matrix) add(compare_gaps(region));
    // Of an input no page can be written, and some cannot be read.
    if (region.is_writable && !region.buffer.canary_intact())
      add(formatted("{}: bytes beside it were overwritten", region.view.name));
  }
  return findings;
}

std::string GuardedArgs::compare_rows(const Region& region, const TensorView& expected) const {
  const TensorView& view = region.view;
  for (int64_t row = 0; row < view.rows; ++row) {
    const unsigned char* found = row_of(view, row);
    const unsigned char* wanted = row_of(expected, row);
    if (region.is_written && std::memcmp(found, wanted, row_bytes(view)) == 0) continue;
    for (int64_t column = 0; column < view.cols; ++column) {
      const size_t at = static_cast<size_t>(column) * view.element;
      const auto offset = static_cast<size_t>(found + at - row_of(view, 0));
      const bool unwritten = is_unwritten(found + at, view.element, offset);
      const std::string where = formatted("{}: {}", view.name, place(view, row, column));
      if (!region.is_written) {
        if (!unwritten) return where + " was written, by a pass that has no such output";
      } else if (std::memcmp(found + at, wanted + at, view.element) != 0) {
        if (unwritten) return where + " was not written";
        return formatted("{} is {}, but {} in the ordinary run", where, bits(found + at, view.element),
                         bits(wanted + at, view.element));
      }
    }
  }
  return {};
}

std::string GuardedArgs::compare_gaps(const Region& region) const {
  const TensorView& view = region.view;
  for (int64_t row = 0; row + 1 < view.rows; ++row) {
    size_t begin = row_offset(view, row) + row_bytes(view);
    size_t end = row_offset(view, row + 1);
    if (is_break(view, row + 1)) {
      if (layout_.flush == Flush::kRight) {
        begin += GuardBuffer::page_bytes();
      } else {
        end -= GuardBuffer::page_bytes();
      }
    }
    for (size_t i = begin; i < end; ++i) {
      if (region.buffer.as<unsigned char>()[i] == unwritten_byte(i)) continue;
      const size_t element = (i - row_offset(view, row)) / view.element;
      return overrun(view, row, element - static_cast<size_t>(view.cols) + 1, true) + " (write)";
    }
  }
  return {};
}

std::string GuardedArgs::describe(const MemoryFault& fault) const {
  const std::string how = formatted(" ({}), {}", access_name(fault.access), layout_.name());
  const auto found =
      std::find_if(regions_.begin(), regions_.end(), [&](const Region& region) { return region.buffer.contains(fault.address); });
  // The processor names no address, nor what was wanted of it.
  if (fault.address == 0) return "a misaligned vector access, or a null or wild pointer, " + layout_.name();
  if (found == regions_.end()) return formatted("address {:#x} is near no argument{}", fault.address, how);
  const TensorView& view = found->view;
  const auto start = reinterpret_cast<uintptr_t>(view.data);
  if (fault.address < start) return overrun(view, 0, (start - fault.address + view.element - 1) / view.element, false) + how;
  const size_t offset = fault.address - start;
  if (offset >= found->buffer.bytes()) {
    return overrun(view, view.rows - 1, (offset - found->buffer.bytes()) / view.element + 1, true) + how;
  }
  const int64_t row = row_at(view, offset);
  const size_t in_row = offset - row_offset(view, row);
  if (in_row < row_bytes(view)) {
    return formatted("{}: {}{}{}", view.name, place(view, row, static_cast<int64_t>(in_row / view.element)), how,
                     found->is_writable ? "" : ", which is an input");
  }
  if (is_break(view, row + 1) && layout_.flush == Flush::kLeft) {
    return overrun(view, row + 1, (row_offset(view, row + 1) - offset + view.element - 1) / view.element, false) + how;
  }
  return overrun(view, row, (in_row - row_bytes(view)) / view.element + 1, true) + how;
}

}  // namespace tileloss::tools
