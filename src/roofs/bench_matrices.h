// The large matrices of a benchmark, what they cost at best, and how they go into a call: logits, or hidden states and a head.
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "oracle/number_formats.h"
#include "roofs/matmul_roof.h"
#include "roofs/roofs.h"
#include "support/device.h"
#include "support/memory.h"
#include "support/thread_team.h"

namespace tileloss::tools {

struct HeadSettings {
  int64_t hidden = 0;          // H; 0: the function takes logits
  bool is_transposed = false;  // the head lies as [H,V]
  bool is_frozen = false;      // no dhead
  int64_t rank = 0;            // of a low-rank part of the head, which has its gradients; 0: none
  oracle::NumberFormat dhead_dtype = oracle::NumberFormat::kFloat32;

  bool is_given() const {
    return hidden > 0 || is_transposed || is_frozen || rank > 0 || dhead_dtype != oracle::NumberFormat::kFloat32;
  }
};

// Logits [rows, columns], or hidden states [rows, H] and a head [columns, H].
struct MatricesSpec {
  int64_t rows = 0;
  int64_t columns = 0;
  oracle::NumberFormat format = oracle::NumberFormat::kBfloat16;
  bool is_linear = false;
  bool in_place = false;     // of logits: dlogits lie where they lie
  bool has_teacher = false;  // a second side, drawn apart from the student's
  HeadSettings head;
  uint64_t seed = 0;

  // What the matrices will hold: to be checked before they are made.
  std::vector<MemoryNeed> needs() const;
};

// Buffers are on huge pages, and every page is touched.
class BenchMatrices {
 public:
  BenchMatrices(const MatricesSpec& spec, ThreadTeam& team);

  // Sets the inputs, and with `gradients` the outputs too.
  void add_to(tileloss_args& args, bool gradients) const;
  // Puts back the student's side, where a call with gradients overwrites it.
  void restore();

  // Of one pass: bytes of these matrices that have to be read or written, and floating point operations of the products. Of what
  // is useful: one product a side forward, and one more for each gradient. A kernel that computes z twice does more.
  double traffic_bytes(bool gradients) const;
  double flops(bool gradients) const;

  // On these buffers; puts back what it overwrites. `isa`: the kernel's.
  Roofs measure_roofs(RoofMeter& meter, tileloss_isa isa);
  // Of a device: with its own copies, and without exp and products.
  Roofs measure_roofs(const Device& device) const;
  // The longest of the things that a pass cannot avoid.
  double roof_ms(const Roofs& roofs, bool gradients) const;

  char* logits() const { return find("logits")->data(); }
  char* dlogits() const { return find(spec_.in_place ? "logits" : "dlogits")->data(); }

 private:
  // One of the call's matrices by its name in tileloss_args.
  struct Matrix {
    const char* name;
    tileloss_matrix tileloss_args::*slot;
    bool is_gradient, is_head;
    int64_t rows, columns;
    oracle::NumberFormat format;
    HugeBuffer memory;  // made by BenchMatrices
  };
  friend MatricesSpec;
  static std::vector<Matrix> list(const MatricesSpec& spec);

  const HugeBuffer* find(const std::string& name) const;  // null: the spec has none
  void fill_random(char* data, int64_t rows, int64_t columns, double std, uint64_t seed, int64_t first_draw);
  void fill_head(const char* name, int64_t columns, uint64_t seed);
  void draw_pattern(uint64_t seed);
  void repeat_pattern(const char* name);
  int sides() const { return spec_.has_teacher ? 2 : 1; }

  MatricesSpec spec_;
  ThreadTeam& team_;
  std::vector<Matrix> matrices_;
  std::vector<char> pattern_;  // the first rows of the logits, repeated down the matrix
  std::optional<MatmulRoof> matmul_roof_;
};

}  // namespace tileloss::tools
