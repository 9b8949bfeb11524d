// The LM head's products, by cuBLASLt: matrices in rows, sums in float32, one algorithm for each kind of product.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <mutex>

#include "backends/cuda/cublas_lt.h"
#include "backends/cuda/runtime.h"

namespace tileloss::impl::cuda {

// Element (i, j) is data[i * stride + j], or, where it lies across, data[j * stride + i].
struct Operand {
  const void* data = nullptr;
  std::int64_t stride = 0;
  bool is_across = false;
};

// to [rows, columns] = left [rows, depth] right [depth, columns], or added to what is there. Sums are float32; bfloat16 is what
// they are rounded to, once.
struct Product {
  std::int64_t rows = 0, columns = 0, depth = 0;
  Operand left, right;
  void* to = nullptr;
  std::int64_t to_stride = 0;
  bool adds = false;
};

// What an algorithm is chosen by. It multiplies matrices of other sizes too, where cuBLASLt accepts it for them: so that a row's
// bits do not depend on how many there are, sizes that follow from the number of rows are none of it.
struct ProductKind {
  std::int32_t device;
  bool is_bfloat16;  // the operands; else float32
  bool makes_bfloat16;
  bool left_is_across, right_is_across;
  std::int64_t rows, columns, depth;
  std::int64_t scratch_bytes;
  auto operator<=>(const ProductKind&) const = default;
};

struct Algorithm {
  ProductKind kind;
  LtHandle handle;
  LtAlgorithm choice;
};

// The algorithms that have been chosen, for the rest of the process.
class Algorithms {
 public:
  // The one for a kind, whose device is the current one.
  Status find(const ProductKind& kind, const Algorithm** found);

 private:
  Status choose(const ProductKind& kind, Algorithm* chosen);

  std::mutex mutex_;
  std::map<std::int32_t, LtHandle> handles_;  // of devices
  std::map<ProductKind, Algorithm> chosen_;
};

// Queued. `scratch` is the kind's, and nobody else's at that time. Where the algorithm is not for these sizes, one that is is
// chosen for them alone. Without an algorithm: nothing is to be multiplied.
void multiply(Queue& queue, const Algorithm* algorithm, const Product& product, void* scratch);

}  // namespace tileloss::impl::cuda
