// Opens the machine's cuBLASLt, or the one that TILELOSS_CUBLASLT names, and makes what needs no GPU.
#include <cstdio>

#include "backends/cuda/cublas_lt.h"

int main() {
  using namespace tileloss::impl::cuda;
  const CublasLt& lt = cublas_lt();
  if (!lt.missing.empty()) {
    std::printf("NOT RUN: %s\n", lt.missing.c_str());
    return 0;
  }
  LtProduct product = nullptr;
  LtMatrix matrix = nullptr;
  LtPreference preference = nullptr;
  const std::int32_t transposed = kLtTransposed;
  const std::uint32_t none = 0, alignment = 16;
  const std::uint64_t bytes = 1 << 20;
  int failed = 0;
  const auto expect = [&](const char* what, LtResult result) {
    if (result != 0) std::printf("%s: %s\n", what, lt.status_name(result)), failed = 1;
  };
  expect("product", lt.product_create(&product, kLtComputeFloat32, kLtFloat32));
  expect("transposed", lt.product_set(product, kLtTransposedA, &transposed, sizeof transposed));
  expect("matrix", lt.matrix_create(&matrix, kLtBfloat16, 64, 32, 64));
  expect("preference", lt.preference_create(&preference));
  expect("workspace", lt.preference_set(preference, kLtMaxWorkspaceBytes, &bytes, sizeof bytes));
  expect("reductions", lt.preference_set(preference, kLtReductionSchemes, &none, sizeof none));
  expect("alignment", lt.preference_set(preference, kLtAlignmentD, &alignment, sizeof alignment));
  expect("preference", lt.preference_destroy(preference));
  expect("matrix", lt.matrix_destroy(matrix));
  expect("product", lt.product_destroy(product));
  std::printf("opened %s\n", lt.path.c_str());
  return failed;
}
