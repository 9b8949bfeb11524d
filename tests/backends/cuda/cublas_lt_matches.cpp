// What cublas_lt.h declares is what cuBLASLt's own header says. Compiled where there is one.
#include <cublasLt.h>

#include <cstddef>
#include <type_traits>

#include "backends/cuda/cublas_lt.h"

namespace tileloss::impl::cuda {
namespace {

static_assert(kLtFloat32 == static_cast<int>(CUDA_R_32F) && kLtFloat16 == static_cast<int>(CUDA_R_16F) &&
              kLtBfloat16 == static_cast<int>(CUDA_R_16BF));
static_assert(kLtNotSupported == static_cast<int>(CUBLAS_STATUS_NOT_SUPPORTED) && CUBLAS_STATUS_SUCCESS == 0 &&
              kLtNoMemory == static_cast<int>(CUBLAS_STATUS_ALLOC_FAILED) &&
              kLtOtherArchitecture == static_cast<int>(CUBLAS_STATUS_ARCH_MISMATCH));
static_assert(kLtComputeFloat32 == static_cast<int>(CUBLAS_COMPUTE_32F));
static_assert(kLtAsItIs == static_cast<int>(CUBLAS_OP_N) && kLtTransposed == static_cast<int>(CUBLAS_OP_T));
static_assert(kLtTransposedA == static_cast<int>(CUBLASLT_MATMUL_DESC_TRANSA) &&
              kLtTransposedB == static_cast<int>(CUBLASLT_MATMUL_DESC_TRANSB));
static_assert(kLtMaxWorkspaceBytes == static_cast<int>(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) &&
              kLtReductionSchemes == static_cast<int>(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK));
static_assert(kLtAlignmentA == static_cast<int>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES) &&
              kLtAlignmentB == static_cast<int>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES) &&
              kLtAlignmentC == static_cast<int>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES) &&
              kLtAlignmentD == static_cast<int>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES));
static_assert(CUBLASLT_REDUCTION_SCHEME_NONE == 0);

static_assert(sizeof(LtAlgorithm) == sizeof(cublasLtMatmulAlgo_t) && sizeof(LtFound) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(LtFound, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
              offsetof(LtFound, state) == offsetof(cublasLtMatmulHeuristicResult_t, state) &&
              offsetof(LtFound, waves) == offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));

// A parameter goes the same way to the callee: as a pointer, or as a number of as many bytes.
template <class A, class B>
constexpr bool goes_alike() {
  if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>) {
    return std::is_pointer_v<A> && std::is_pointer_v<B>;
  } else {
    return sizeof(A) == sizeof(B) && !std::is_floating_point_v<A> && !std::is_floating_point_v<B>;
  }
}
template <class R, class... P, class S, class... Q>
constexpr bool are_alike(R (*)(P...), S (*)(Q...)) {
  if constexpr (sizeof...(P) != sizeof...(Q)) {
    return false;
  } else {
    return goes_alike<R, S>() && (goes_alike<P, Q>() && ...);
  }
}
constexpr CublasLt* kTable = nullptr;
#define TILELOSS_IS_ALIKE(ours, theirs) static_assert(are_alike(decltype(kTable->ours)(nullptr), decltype (&theirs)(nullptr)))
TILELOSS_IS_ALIKE(create, cublasLtCreate);
TILELOSS_IS_ALIKE(status_name, cublasLtGetStatusName);
TILELOSS_IS_ALIKE(product_create, cublasLtMatmulDescCreate);
TILELOSS_IS_ALIKE(product_destroy, cublasLtMatmulDescDestroy);
TILELOSS_IS_ALIKE(product_set, cublasLtMatmulDescSetAttribute);
TILELOSS_IS_ALIKE(matrix_create, cublasLtMatrixLayoutCreate);
TILELOSS_IS_ALIKE(matrix_destroy, cublasLtMatrixLayoutDestroy);
TILELOSS_IS_ALIKE(preference_create, cublasLtMatmulPreferenceCreate);
TILELOSS_IS_ALIKE(preference_destroy, cublasLtMatmulPreferenceDestroy);
TILELOSS_IS_ALIKE(preference_set, cublasLtMatmulPreferenceSetAttribute);
TILELOSS_IS_ALIKE(find, cublasLtMatmulAlgoGetHeuristic);
TILELOSS_IS_ALIKE(check, cublasLtMatmulAlgoCheck);
TILELOSS_IS_ALIKE(multiply, cublasLtMatmul);

}  // namespace
}  // namespace tileloss::impl::cuda
