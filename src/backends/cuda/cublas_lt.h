// What is used of cuBLASLt, opened when the first LM head asks for it. It is declared here, so that the build needs nothing of
// cuBLAS: handles are opaque, and these numbers and structs are the same in cuBLAS 12 and 13
// (tests/backends/cuda/cublas_lt_matches.cpp compares them with its header).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace tileloss::impl::cuda {

// A call's result; 0: it succeeded.
using LtResult = int;
inline constexpr LtResult kLtNoMemory = 3, kLtOtherArchitecture = 8, kLtNotSupported = 15;

enum LtType : int { kLtFloat32 = 0, kLtFloat16 = 2, kLtBfloat16 = 14 };
inline constexpr int kLtComputeFloat32 = 68;  // no TF32
enum LtTransposed : std::int32_t { kLtAsItIs = 0, kLtTransposed = 1 };
enum LtProductAttribute : int { kLtTransposedA = 3, kLtTransposedB = 4 };
enum LtPreferenceAttribute : int {
  kLtMaxWorkspaceBytes = 1,  // uint64
  kLtReductionSchemes = 3,   // uint32, bits; 0: no sum is split
  kLtAlignmentA = 5,         // uint32, bytes; the others follow
  kLtAlignmentB = 6,
  kLtAlignmentC = 7,
  kLtAlignmentD = 8,
};

struct LtAlgorithm {
  std::uint64_t data[8];
};
struct LtFound {
  LtAlgorithm algorithm;
  std::size_t workspace_bytes;
  LtResult state;
  float waves;
  int reserved[4];
};

// Handles: of the library on a device, of a product, of a matrix (column after column), of what is preferred.
using LtHandle = struct LtHandleOpaque*;
using LtProduct = struct LtProductOpaque*;
using LtMatrix = struct LtMatrixOpaque*;
using LtPreference = struct LtPreferenceOpaque*;

struct CublasLt {
  std::string missing;  // what is; empty: all of it is there
  std::string path;     // of the library that was opened, as it was named

  LtResult (*create)(LtHandle* handle);
  const char* (*status_name)(LtResult result);
  LtResult (*product_create)(LtProduct* product, int compute_type, int scale_type);
  LtResult (*product_destroy)(LtProduct product);
  LtResult (*product_set)(LtProduct product, int attribute, const void* value, std::size_t bytes);
  LtResult (*matrix_create)(LtMatrix* matrix, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t stride);
  LtResult (*matrix_destroy)(LtMatrix matrix);
  LtResult (*preference_create)(LtPreference* preference);
  LtResult (*preference_destroy)(LtPreference preference);
  LtResult (*preference_set)(LtPreference preference, int attribute, const void* value, std::size_t bytes);
  LtResult (*find)(LtHandle handle, LtProduct product, LtMatrix a, LtMatrix b, LtMatrix c, LtMatrix d, LtPreference preference,
                   int most, LtFound* found, int* count);
  // Whether an algorithm does this product, and what it needs for that; `found`'s algorithm is left alone.
  LtResult (*check)(LtHandle handle, LtProduct product, LtMatrix a, LtMatrix b, LtMatrix c, LtMatrix d,
                    const LtAlgorithm* algorithm, LtFound* found);
  // D = alpha A B + beta C.
  LtResult (*multiply)(LtHandle handle, LtProduct product, const void* alpha, const void* a, LtMatrix a_matrix, const void* b,
                       LtMatrix b_matrix, const void* beta, const void* c, LtMatrix c_matrix, void* d, LtMatrix d_matrix,
                       const LtAlgorithm* algorithm, void* workspace, std::size_t workspace_bytes, cudaStream_t stream);
};

// set(name, pointer) for each function that is used.
template <class Table, class Set>
void for_each_function(Table& lt, Set&& set) {
  set("cublasLtCreate", lt.create);
  set("cublasLtGetStatusName", lt.status_name);
  set("cublasLtMatmulDescCreate", lt.product_create);
  set("cublasLtMatmulDescDestroy", lt.product_destroy);
  set("cublasLtMatmulDescSetAttribute", lt.product_set);
  set("cublasLtMatrixLayoutCreate", lt.matrix_create);
  set("cublasLtMatrixLayoutDestroy", lt.matrix_destroy);
  set("cublasLtMatmulPreferenceCreate", lt.preference_create);
  set("cublasLtMatmulPreferenceDestroy", lt.preference_destroy);
  set("cublasLtMatmulPreferenceSetAttribute", lt.preference_set);
  set("cublasLtMatmulAlgoGetHeuristic", lt.find);
  set("cublasLtMatmulAlgoCheck", lt.check);
  set("cublasLtMatmul", lt.multiply);
}

// Opened once. The one that the environment variable TILELOSS_CUBLASLT names, if it is set; else one that is loaded already, as
// PyTorch and JAX do; else as the loader finds it; else that of the package nvidia-cublas beside this library.
const CublasLt& cublas_lt();

}  // namespace tileloss::impl::cuda
