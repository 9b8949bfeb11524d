// The tensors of a call in memory where every access outside them faults, and what can be said of such a fault.
#pragma once

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "judge/strict/guard_buffer.h"
#include "support/arg_slots.h"

namespace tileloss::tools {

// Two mappings a row; Linux grants a process 65530, and a call with the LM head has two such matrices.
constexpr int64_t kMaxApartRows = 8192;

struct GuardLayout {
  enum class Rows {
    kAdjoining,  // row stride = columns: only the first and last row touch a guard page
    kGaps,       // some odd number of elements between the rows of a matrix, all NaN: every row starts at another alignment
    kApart,      // a guard page between every two rows of a matrix, which the rows touch on the layout's side; beyond
                 // kMaxApartRows, gaps
    kGroups,     // logits, the teacher's too, and dlogits as two or more groups of adjoining rows (row_groups), with a guard page
                 // between two groups
  };

  Flush flush;
  Rows rows;

  std::string name() const;
};

// An access that faulted.
struct MemoryFault {
  uintptr_t address;
  enum Access : int32_t { kRead, kWrite, kUnknown } access;
};

// Inputs are copied from the caller's tensors and mapped read-only; what a call adds to is copied too. Other outputs, the gaps
// between rows and the workspace start as a NaN of an unusual pattern (0x7fa5 in every 16 bits), so that what is left unwritten
// shows.
class GuardedArgs {
 public:
  // `given`: the caller's tensors. `pass` decides whether the row state is an input; `adds`: the call adds to dhead and dbias.
  GuardedArgs(tileloss_pass pass, const tileloss_args& given, GuardLayout layout, bool adds);
  // Whether `layout` is another one for these tensors than adjoining rows: there are no groups without logits of two rows.
  static bool is_of_use(const tileloss_args& given, GuardLayout layout);

  const tileloss_args& args() const { return args_; }
  // Takes the access from the words of these rows' sets, where the layout has each row's on pages of its own.
  void hide_sets(const std::vector<int64_t>& rows);
  // As large as the plan says, and not a byte more.
  tileloss_run add_workspace(const tileloss_plan& plan);

  // What is wrong after a call: outputs that differ from `expected`'s in any bit or were not written, and changes between rows or
  // around a tensor. One line each, at most one a tensor.
  std::vector<std::string> compare(const tileloss_args& expected) const;

  // "dlogits overrun: row 7, 3 elements past the end (write), flush right".
  std::string describe(const MemoryFault& fault) const;

 private:
  // A tensor in its guarded memory.
  struct Region {
    TensorView view;
    GuardBuffer buffer;
    bool is_writable;
    bool is_written;  // by this pass: a backward takes the forward's outputs along and leaves them alone
  };

  bool is_apart(const TensorView& view) const;
  // Whether a guard page lies before this row.
  bool is_break(const TensorView& view, int64_t row) const;
  void place_rows(TensorView& view) const;
  void host(const TensorView& given, TensorView& view);
  void insert_guard_pages(Region& region);
  std::string compare_rows(const Region& region, const TensorView& expected) const;
  std::string compare_gaps(const Region& region) const;

  tileloss_pass pass_;
  GuardLayout layout_;
  tileloss_args args_;
  std::unique_ptr<tileloss_row_state> row_state_;  // what args_ points at
  std::vector<Region> regions_;
  std::vector<size_t> region_of_tensor_;  // in the order of for_each_tensor; in place, dlogits lies in the logits' region
};

}  // namespace tileloss::tools
