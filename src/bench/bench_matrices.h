// The large matrices of a benchmark, what they cost at best, and how they go into a call: logits, or hidden states and a head.
#ifndef TILELOSS_BENCH_BENCH_MATRICES_H_
#define TILELOSS_BENCH_BENCH_MATRICES_H_

#include <tileloss/tileloss.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bench/matmul_roof.h"
#include "bench/roofs.h"
#include "reference/number_formats.h"
#include "support/memory.h"
#include "support/thread_team.h"

namespace tileloss::tools {

// Buffers are on huge pages, and every page is touched. `needs` says what the matrices of that size will hold: to be checked
// before they are made.
class BenchMatrices {
 public:
  virtual ~BenchMatrices() = default;

  // Sets the inputs, and with `gradients` the outputs too.
  virtual void add_to(tileloss_args& args, bool gradients) const = 0;
  // Whether a call with gradients overwrites the inputs, and how they are put back.
  virtual bool gradient_is_in_place() const { return false; }
  virtual void restore() {}

  // Of one pass: bytes of these matrices that have to be read or written, and floating point operations of the products.
  virtual double traffic_bytes(bool gradients) const = 0;
  virtual double flops(bool /*gradients*/) const { return 0; }

  // On these buffers; puts back what it overwrites. `isa`: the kernel's.
  virtual Roofs measure_roofs(RoofMeter& meter, tileloss_isa isa) = 0;
  // The longest of the things that a pass cannot avoid.
  virtual double roof_ms(const Roofs& roofs, bool gradients) const = 0;
};

class LogitsMatrices : public BenchMatrices {
 public:
  // With a teacher: its logits too, drawn apart from the student's.
  static std::vector<MemoryNeed> needs(int64_t rows, int64_t columns, reference::NumberFormat format, bool in_place,
                                       bool has_teacher);
  LogitsMatrices(int64_t rows, int64_t columns, reference::NumberFormat format, bool in_place, bool has_teacher, uint64_t seed,
                 ThreadTeam& team);

  void add_to(tileloss_args& args, bool gradients) const override;
  bool gradient_is_in_place() const override { return dlogits_.empty(); }
  void restore() override;
  double traffic_bytes(bool gradients) const override {
    return static_cast<double>(logits_.bytes()) * (gradients ? 2 : 1) + static_cast<double>(teacher_.bytes());
  }
  Roofs measure_roofs(RoofMeter& meter, tileloss_isa isa) override;
  double roof_ms(const Roofs& roofs, bool gradients) const override;

  char* logits() const { return logits_.data(); }
  char* dlogits() const { return dlogits_.empty() ? logits_.data() : dlogits_.data(); }

 private:
  void repeat_pattern(HugeBuffer& matrix);

  int64_t rows_;
  int64_t columns_;
  reference::NumberFormat format_;
  ThreadTeam& team_;
  HugeBuffer logits_;
  HugeBuffer dlogits_;         // separate output only
  HugeBuffer teacher_;         // with a teacher
  std::vector<char> pattern_;  // the first rows of the logits, repeated down the matrix
};

struct HeadSettings {
  int64_t hidden = 0;          // H; 0: the function takes logits
  bool is_transposed = false;  // the head lies as [H,V]
  bool is_frozen = false;      // no dhead
  reference::NumberFormat dhead_dtype = reference::NumberFormat::kFloat32;

  bool is_given() const { return hidden > 0 || is_transposed || is_frozen || dhead_dtype != reference::NumberFormat::kFloat32; }
};

class HeadMatrices : public BenchMatrices {
 public:
  static std::vector<MemoryNeed> needs(int64_t rows, int64_t columns, reference::NumberFormat format,
                                       const HeadSettings& settings, bool has_teacher);
  HeadMatrices(int64_t rows, int64_t columns, reference::NumberFormat format, const HeadSettings& settings, bool has_teacher,
               uint64_t seed, ThreadTeam& team);

  void add_to(tileloss_args& args, bool gradients) const override;
  double traffic_bytes(bool gradients) const override;
  // Of what is useful: one product a side forward, and one more for each gradient. A kernel that computes z twice does more.
  double flops(bool gradients) const override;
  Roofs measure_roofs(RoofMeter& meter, tileloss_isa isa) override;
  double roof_ms(const Roofs& roofs, bool gradients) const override;

 private:
  void fill_head(HugeBuffer& head, uint64_t seed);
  tileloss_matrix head_view(const HugeBuffer& buffer, reference::NumberFormat format) const;

  int64_t rows_;
  int64_t columns_;
  reference::NumberFormat format_;
  HeadSettings settings_;
  uint64_t seed_;
  ThreadTeam& team_;
  HugeBuffer hidden_, head_, dhidden_;
  HugeBuffer dhead_;                          // empty with a frozen head
  HugeBuffer teacher_hidden_, teacher_head_;  // with a teacher
  std::optional<MatmulRoof> matmul_roof_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_BENCH_MATRICES_H_
