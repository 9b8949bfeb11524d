#include "backends/cuda/linear_products.h"

#include <string>

#include "backends/cuda/linear_plan.h"

namespace tileloss::impl::cuda {
namespace {

constexpr std::uint32_t kAlignment = 16;  // of all operands and sums, and from row to row of them

Status lt_status(LtResult result, const char* what) {
  if (result == 0) return {};
  const bool is_lacking = result == kLtNotSupported || result == kLtOtherArchitecture;
  const tileloss_status code = result == kLtNoMemory ? TILELOSS_OUT_OF_MEMORY
                               : is_lacking          ? TILELOSS_UNSUPPORTED
                                                     : TILELOSS_INTERNAL;
  return {code, std::string("cuda: cuBLASLt: ") + what + ": " + cublas_lt().status_name(result)};
}

// What cuBLASLt calls a product: matrices go column after column there, so that left and right change places and what lies in
// rows is transposed by itself.
class Description {
 public:
  Description(const Product& p, const ProductKind& kind) {
    const LtType type = kind.is_bfloat16 ? kLtBfloat16 : kLtFloat32;
    keep(lt_.product_create(&product_, kLtComputeFloat32, kLtFloat32));
    set(kLtTransposedA, p.right.is_across);
    set(kLtTransposedB, p.left.is_across);
    matrix(&right_, type, p.depth, p.columns, p.right.stride, p.right.is_across);
    matrix(&left_, type, p.rows, p.depth, p.left.stride, p.left.is_across);
    matrix(&to_, kind.makes_bfloat16 ? kLtBfloat16 : kLtFloat32, p.rows, p.columns, p.to_stride, false);
  }
  ~Description() {
    for (const LtMatrix m : {right_, left_, to_}) {
      if (m != nullptr) lt_.matrix_destroy(m);
    }
    if (product_ != nullptr) lt_.product_destroy(product_);
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  LtResult choose(LtHandle handle, std::int64_t scratch_bytes, LtAlgorithm* chosen) const {
    LtPreference preference = nullptr;
    LtResult result = result_;
    const auto prefer = [&](int attribute, auto value) {
      if (result == 0) result = lt_.preference_set(preference, attribute, &value, sizeof value);
    };
    if (result == 0) result = lt_.preference_create(&preference);
    prefer(kLtMaxWorkspaceBytes, static_cast<std::uint64_t>(scratch_bytes));
    prefer(kLtReductionSchemes, std::uint32_t{0});
    for (const int operand : {kLtAlignmentA, kLtAlignmentB, kLtAlignmentC, kLtAlignmentD}) prefer(operand, kAlignment);
    LtFound found = {};
    int count = 0;
    if (result == 0) result = lt_.find(handle, product_, right_, left_, to_, to_, preference, 1, &found, &count);
    if (preference != nullptr) lt_.preference_destroy(preference);
    if (result == 0) result = count > 0 ? found.state : kLtNotSupported;
    *chosen = found.algorithm;
    return result;
  }
  bool accepts(const Algorithm& algorithm) const {
    LtFound found = {};
    const LtResult result = lt_.check(algorithm.handle, product_, right_, left_, to_, to_, &algorithm.choice, &found);
    return result == 0 && found.workspace_bytes <= static_cast<std::size_t>(algorithm.kind.scratch_bytes);
  }
  LtResult multiply(const Algorithm& algorithm, const Product& p, void* scratch, cudaStream_t stream) const {
    const float one = 1, beta = p.adds ? 1 : 0;
    LtAlgorithm choice = algorithm.choice;
    LtResult result = result_;
    if (result == 0 && !accepts(algorithm)) result = choose(algorithm.handle, algorithm.kind.scratch_bytes, &choice);
    if (result != 0) return result;
    return lt_.multiply(algorithm.handle, product_, &one, p.right.data, right_, p.left.data, left_, &beta, p.to, to_, p.to, to_,
                        &choice, scratch, static_cast<std::size_t>(algorithm.kind.scratch_bytes), stream);
  }

 private:
  void keep(LtResult result) {
    if (result_ == 0) result_ = result;
  }
  void set(int attribute, bool is_across) {
    const std::int32_t value = is_across ? kLtTransposed : kLtAsItIs;
    if (result_ == 0) keep(lt_.product_set(product_, attribute, &value, sizeof value));
  }
  void matrix(LtMatrix* to, LtType type, std::int64_t rows, std::int64_t columns, std::int64_t stride, bool is_across) {
    const auto lines = static_cast<std::uint64_t>(is_across ? columns : rows);
    const auto line = static_cast<std::uint64_t>(is_across ? rows : columns);
    if (result_ == 0) keep(lt_.matrix_create(to, type, line, lines, stride));
  }

  const CublasLt& lt_ = cublas_lt();
  LtResult result_ = 0;
  LtProduct product_ = nullptr;
  LtMatrix right_ = nullptr, left_ = nullptr, to_ = nullptr;
};

// Of a product or a kind of them.
std::string shape_of(const auto& p) {
  return "[" + std::to_string(p.rows) + "," + std::to_string(p.depth) + "] [" + std::to_string(p.depth) + "," +
         std::to_string(p.columns) + "]";
}

}  // namespace

Status Algorithms::find(const ProductKind& kind, const Algorithm** found) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto at = chosen_.find(kind);
  if (at == chosen_.end()) {
    Algorithm chosen = {};
    if (Status s = choose(kind, &chosen); !s.ok()) return s;
    at = chosen_.emplace(kind, chosen).first;
  }
  *found = &at->second;
  return {};
}

Status Algorithms::choose(const ProductKind& kind, Algorithm* chosen) {
  const CublasLt& lt = cublas_lt();
  if (!lt.missing.empty())
    return {TILELOSS_UNSUPPORTED, "cuda: the LM head needs cuBLASLt 13 or 12, which TILELOSS_CUBLASLT can name: " + lt.missing};
  const ApartFromCapture apart;
  LtHandle& handle = handles_[kind.device];
  if (handle == nullptr) {
    if (Status s = lt_status(lt.create(&handle), "it could not be started"); !s.ok()) return s;
  }
  Product product;
  product.rows = kind.rows, product.columns = kind.columns, product.depth = kind.depth;
  product.left = {nullptr, row_stride_of(kind.left_is_across ? kind.rows : kind.depth), kind.left_is_across};
  product.right = {nullptr, row_stride_of(kind.right_is_across ? kind.depth : kind.columns), kind.right_is_across};
  product.to_stride = row_stride_of(kind.columns);
  *chosen = {kind, handle, {}};
  const LtResult result = Description(product, kind).choose(handle, kind.scratch_bytes, &chosen->choice);
  return lt_status(result, ("no algorithm for " + shape_of(kind)).c_str());
}

void multiply(Queue& queue, const Algorithm* algorithm, const Product& p, void* scratch) {
  if (!queue.status().ok() || p.rows == 0 || p.columns == 0) return;
  if (p.depth == 0) {  // a sum of nothing
    if (p.adds) return;
    const bool makes_bfloat16 = algorithm != nullptr && algorithm->kind.makes_bfloat16;
    const auto bytes = static_cast<std::size_t>(p.rows * p.to_stride) * (makes_bfloat16 ? 2 : 4);
    return queue.keep(cudaMemsetAsync(p.to, 0, bytes, queue.stream()), "the workspace");
  }
  const Description description(p, algorithm->kind);
  const LtResult result = description.multiply(*algorithm, p, scratch, queue.stream());
  queue.keep(lt_status(result, ("the product " + shape_of(p)).c_str()));
}

}  // namespace tileloss::impl::cuda
