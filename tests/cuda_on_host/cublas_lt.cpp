// A product's sums are float32, in an order that depends on their length alone; where an algorithm may split them, on nothing.
// Its workspace is filled with NaN. Arguments that the library would refuse, or that are not the device's memory, are refused.
#include "tests/cuda_on_host/cublas_lt.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "backends/cuda/cublas_lt.h"
#include "core/number_formats.h"
#include "tests/cuda_on_host/streams.h"

namespace tileloss::impl::cuda {

struct LtHandleOpaque {
  int device;
};
struct LtProductOpaque {
  int compute_type, scale_type;
  std::int32_t a_is_transposed = 0, b_is_transposed = 0;
};
struct LtMatrixOpaque {
  int type;
  std::uint64_t rows, columns;
  std::int64_t stride;
};
struct LtPreferenceOpaque {
  std::uint64_t workspace_bytes = 0;
  std::uint32_t reduction_schemes = 7, alignment[4] = {256, 256, 256, 256};
};

namespace {

constexpr LtResult kInvalidValue = 7;

// What an algorithm is for, and needs.
struct Choice {
  std::uint64_t type, transposed, alignment, workspace_bytes, may_split;
  std::uint64_t extents;  // of what lies together: multiples of it
  std::uint64_t rows;     // of the product that it was found for, column after column
  std::uint64_t made;     // its type
};
static_assert(sizeof(Choice) == sizeof(LtAlgorithm));

std::uint64_t transposed(const LtProductOpaque& p) {
  return static_cast<std::uint64_t>(p.a_is_transposed * 2 + p.b_is_transposed);
}
std::uint64_t bytes_of(int type) { return type == kLtFloat32 ? 4 : 2; }
std::uint64_t extent(const LtMatrixOpaque& m) {
  return m.rows == 0 || m.columns == 0 ? 0 : ((m.columns - 1) * static_cast<std::uint64_t>(m.stride) + m.rows) * bytes_of(m.type);
}

// The power of two, up to 8, that the lengths of all columns are multiples of.
std::uint64_t extents_of(const LtMatrixOpaque& a, const LtMatrixOpaque& b, const LtMatrixOpaque& d) {
  const std::uint64_t all = a.rows | b.rows | d.rows | 8;
  return all & ~(all - 1);
}

struct Sizes {
  std::uint64_t rows, columns, depth;  // of op(A) op(B)
};
LtResult refuse(const char* what) {
  std::fprintf(stderr, "cuda_on_host: cuBLASLt: %s\n", what);
  return kInvalidValue;
}
// Null: the product is one.
const char* sizes_of(const LtProductOpaque& p, const LtMatrixOpaque& a, const LtMatrixOpaque& b, const LtMatrixOpaque& c,
                     const LtMatrixOpaque& d, Sizes& sizes) {
  sizes = {p.a_is_transposed != 0 ? a.columns : a.rows, p.b_is_transposed != 0 ? b.rows : b.columns,
           p.a_is_transposed != 0 ? a.rows : a.columns};
  if (p.compute_type != kLtComputeFloat32 || p.scale_type != kLtFloat32) return "sums are float32 here";
  if (a.type != b.type || (a.type != kLtFloat32 && a.type != kLtBfloat16))
    return "operands are both float32 or both bfloat16 here";
  if (c.type != d.type || (d.type != kLtFloat32 && (d.type != kLtBfloat16 || a.type != kLtBfloat16)))
    return "what is made is float32 here, or bfloat16 as the operands are";
  if (sizes.depth != (p.b_is_transposed != 0 ? b.columns : b.rows)) return "A and B do not fit";
  if (d.rows != sizes.rows || d.columns != sizes.columns || c.rows != d.rows || c.columns != d.columns || c.stride != d.stride)
    return "C or D do not fit";
  if (sizes.rows == 0 || sizes.columns == 0 || sizes.depth == 0) return "an empty product";
  for (const LtMatrixOpaque* m : {&a, &b, &d}) {
    if (m->stride < static_cast<std::int64_t>(m->rows)) return "columns overlap";
    if (static_cast<std::uint64_t>(m->stride) * bytes_of(m->type) % 16 != 0) return "columns are not aligned to 16 bytes";
  }
  return nullptr;
}

// Null: the algorithm does that product.
const char* refusal_of(const LtAlgorithm& algorithm, const LtProductOpaque& product, const LtMatrixOpaque& a,
                       const LtMatrixOpaque& b, const LtMatrixOpaque& d, Choice& choice) {
  std::memcpy(&choice, &algorithm, sizeof choice);
  if (choice.type != static_cast<std::uint64_t>(a.type) || choice.made != static_cast<std::uint64_t>(d.type) ||
      choice.transposed != transposed(product))
    return "an algorithm of another kind of product";
  if (extents_of(a, b, d) % choice.extents != 0) return "an algorithm of longer vectors";
  if (d.columns < cuda_on_host::products().fewest_rows && choice.rows != d.columns) return "an algorithm for more rows";
  return nullptr;
}

struct Span {
  std::uintptr_t begin, end;
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};
// Of the device's memory; false where it is not.
bool span_of(const void* data, std::uint64_t bytes, int device, Span& span) {
  span = {reinterpret_cast<std::uintptr_t>(data), reinterpret_cast<std::uintptr_t>(data) + bytes};
  if (bytes == 0) return true;
  const auto* const piece = cuda_on_host::devices().find(data);
  return piece != nullptr && !piece->second.is_host && piece->second.device == device &&
         span.end <= piece->first + piece->second.bytes;
}

// [lines, depth] in float32.
std::vector<float> operand(const void* data, const LtMatrixOpaque& m, bool depth_is_together) {
  const std::uint64_t lines = depth_is_together ? m.columns : m.rows, depth = depth_is_together ? m.rows : m.columns;
  const auto stride = static_cast<std::uint64_t>(m.stride);
  std::vector<float> values(lines * depth);
  for (std::uint64_t i = 0; i < lines; ++i) {
    for (std::uint64_t k = 0; k < depth; ++k) {
      const std::uint64_t at = depth_is_together ? i * stride + k : k * stride + i;
      values[i * depth + k] =
          m.type == kLtFloat32 ? static_cast<const float*>(data)[at] : to_float(static_cast<const Bfloat16*>(data)[at]);
    }
  }
  return values;
}

float toward_zero(double x) {
  const auto rounded = static_cast<float>(x);
  return std::isfinite(rounded) && std::fabs(rounded) > std::fabs(x) ? std::nextafter(rounded, 0.0f) : rounded;
}

// From the last term to the first, 16 at a time, in some sums by turns; what a sum has no digits for is cut off, as tensor cores
// do.
float dot(const float* a, const float* b, std::uint64_t depth, unsigned parts) {
  float sums[8] = {};
  for (std::uint64_t end = depth, turn = 0; end > 0; ++turn) {
    const std::uint64_t begin = end > 16 ? end - 16 : 0;
    double sum = sums[turn % parts];
    while (end > begin) --end, sum += static_cast<double>(a[end]) * static_cast<double>(b[end]);
    sums[turn % parts] = toward_zero(sum);
  }
  float all = 0;
  for (unsigned s = 0; s < parts; ++s) all += sums[s];
  return all;
}

// Takes some of the device's memory.
LtResult create(LtHandle* handle) {
  const std::lock_guard<std::mutex> lock(cuda_on_host::devices().mutex);
  if (cuda_on_host::devices().forbidden_by_capture()) return refuse("a handle while a stream is captured");
  *handle = new LtHandleOpaque{cuda_on_host::current_device()};
  return 0;
}
const char* status_name(LtResult result) {
  return result == kInvalidValue ? "CUBLAS_STATUS_INVALID_VALUE"
         : result == 0           ? "CUBLAS_STATUS_SUCCESS"
                                 : "CUBLAS_STATUS_NOT_SUPPORTED";
}
LtResult product_create(LtProduct* product, int compute_type, int scale_type) {
  *product = new LtProductOpaque{compute_type, scale_type};
  return 0;
}
LtResult product_destroy(LtProduct product) {
  delete product;
  return 0;
}
LtResult product_set(LtProduct product, int attribute, const void* value, std::size_t bytes) {
  if (bytes != sizeof(std::int32_t)) return refuse("an attribute's size");
  std::int32_t transposed = 0;
  std::memcpy(&transposed, value, bytes);
  if (transposed != kLtAsItIs && transposed != kLtTransposed) return refuse("an operation that is not here");
  if (attribute == kLtTransposedA) product->a_is_transposed = transposed;
  if (attribute == kLtTransposedB) product->b_is_transposed = transposed;
  return attribute == kLtTransposedA || attribute == kLtTransposedB ? 0 : refuse("an attribute that is not here");
}
LtResult matrix_create(LtMatrix* matrix, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t stride) {
  *matrix = new LtMatrixOpaque{type, rows, columns, stride};
  return 0;
}
LtResult matrix_destroy(LtMatrix matrix) {
  delete matrix;
  return 0;
}
LtResult preference_create(LtPreference* preference) {
  *preference = new LtPreferenceOpaque();
  return 0;
}
LtResult preference_destroy(LtPreference preference) {
  delete preference;
  return 0;
}
LtResult preference_set(LtPreference preference, int attribute, const void* value, std::size_t bytes) {
  if (attribute == kLtMaxWorkspaceBytes && bytes == 8) return std::memcpy(&preference->workspace_bytes, value, bytes), 0;
  if (bytes != 4) return refuse("a preference's size");
  if (attribute == kLtReductionSchemes) return std::memcpy(&preference->reduction_schemes, value, bytes), 0;
  if (attribute < kLtAlignmentA || attribute > kLtAlignmentD) return refuse("a preference that is not here");
  std::memcpy(&preference->alignment[attribute - kLtAlignmentA], value, bytes);
  return 0;
}

LtResult find(LtHandle handle, LtProduct product, LtMatrix a, LtMatrix b, LtMatrix c, LtMatrix d, LtPreference preference,
              int most, LtFound* found, int* count) {
  const std::lock_guard<std::mutex> lock(cuda_on_host::devices().mutex);
  ++cuda_on_host::products().searches;
  *count = 0;
  Sizes sizes;
  if (handle->device != cuda_on_host::current_device()) return refuse("a handle of another device");
  if (const char* const wrong = sizes_of(*product, *a, *b, *c, *d, sizes); wrong != nullptr) return refuse(wrong);
  if (most < 1) return refuse("no algorithm was asked for");
  Choice choice = {};
  choice.type = static_cast<std::uint64_t>(a->type);
  choice.made = static_cast<std::uint64_t>(d->type);
  choice.transposed = transposed(*product);
  choice.alignment = 256;
  for (const std::uint32_t alignment : preference->alignment)
    choice.alignment = std::min<std::uint64_t>(choice.alignment, alignment);
  choice.workspace_bytes = preference->workspace_bytes;  // all that there may be
  choice.may_split = preference->reduction_schemes;
  choice.extents = extents_of(*a, *b, *d);
  choice.rows = d->columns;
  *found = {};
  std::memcpy(&found->algorithm, &choice, sizeof choice);
  found->workspace_bytes = choice.workspace_bytes;
  *count = 1;
  return 0;
}

LtResult check(LtHandle handle, LtProduct product, LtMatrix a, LtMatrix b, LtMatrix c, LtMatrix d, const LtAlgorithm* algorithm,
               LtFound* found) {
  const std::lock_guard<std::mutex> lock(cuda_on_host::devices().mutex);
  Sizes sizes;
  Choice choice;
  if (handle->device != cuda_on_host::current_device()) return refuse("a handle of another device");
  if (const char* const wrong = sizes_of(*product, *a, *b, *c, *d, sizes); wrong != nullptr) return refuse(wrong);
  if (refusal_of(*algorithm, *product, *a, *b, *d, choice) != nullptr) return kLtNotSupported;
  found->workspace_bytes = choice.workspace_bytes;
  return 0;
}

LtResult multiply(LtHandle handle, LtProduct product, const void* alpha, const void* a, LtMatrix a_matrix, const void* b,
                  LtMatrix b_matrix, const void* beta, const void* c, LtMatrix c_matrix, void* d, LtMatrix d_matrix,
                  const LtAlgorithm* algorithm, void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
  Sizes sizes;
  unsigned parts = 3;
  {
    const std::lock_guard<std::mutex> lock(cuda_on_host::devices().mutex);
    const int device = cuda_on_host::current_device();
    if (handle->device != device) return refuse("a handle of another device");
    if (const char* const wrong = sizes_of(*product, *a_matrix, *b_matrix, *c_matrix, *d_matrix, sizes); wrong != nullptr)
      return refuse(wrong);
    Choice choice;
    if (const char* const wrong = refusal_of(*algorithm, *product, *a_matrix, *b_matrix, *d_matrix, choice); wrong != nullptr)
      return refuse(wrong);
    for (const void* data : {a, b, c, static_cast<const void*>(d)}) {
      if (reinterpret_cast<std::uintptr_t>(data) % choice.alignment != 0) return refuse("a matrix is not aligned as was said");
    }
    if (workspace_bytes < choice.workspace_bytes || reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0)
      return refuse("the workspace is too small, or not aligned to 256 bytes");
    Span spans[4];
    const bool are_its = span_of(a, extent(*a_matrix), device, spans[0]) && span_of(b, extent(*b_matrix), device, spans[1]) &&
                         span_of(d, extent(*d_matrix), device, spans[2]) &&
                         span_of(workspace, choice.workspace_bytes, device, spans[3]);
    if (!are_its) return refuse("not the device's memory");
    if (spans[2].meets(spans[0]) || spans[2].meets(spans[1]) || spans[3].meets(spans[0]) || spans[3].meets(spans[1]) ||
        spans[3].meets(spans[2]))
      return refuse("what is written overlaps what is read");
    if (c != d) return refuse("C is D here");
    if (d_matrix->type != kLtFloat32 && *static_cast<const float*>(beta) != 0) return refuse("only float32 is added to here");
    if (choice.may_split != 0) parts = 1 + cuda_on_host::devices().random.below(8);
    cuda_on_host::products().multiply_adds += static_cast<std::int64_t>(sizes.rows * sizes.columns * sizes.depth);
  }
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  const cudaError_t error = cuda_on_host::queue_kernel(
      config, nullptr,
      [=, product = *product, a_matrix = *a_matrix, b_matrix = *b_matrix, d_matrix = *d_matrix,
       stride = static_cast<std::uint64_t>(d_matrix->stride), alpha = *static_cast<const float*>(alpha),
       beta = *static_cast<const float*>(beta)] {
        cuda_on_host::begin_kernel();
        std::memset(workspace, 0xff, workspace_bytes);
        const std::vector<float> left = operand(a, a_matrix, product.a_is_transposed != 0);
        const std::vector<float> right = operand(b, b_matrix, product.b_is_transposed == 0);
        for (std::uint64_t j = 0; j < sizes.columns; ++j) {
          for (std::uint64_t i = 0; i < sizes.rows; ++i) {
            const float sum = alpha * dot(&left[i * sizes.depth], &right[j * sizes.depth], sizes.depth, parts);
            const std::uint64_t at = j * stride + i;
            if (d_matrix.type == kLtFloat32) {
              float& to = static_cast<float*>(d)[at];
              to = sum + (beta != 0 ? beta * to : 0);
            } else {
              static_cast<Bfloat16*>(d)[at] = from_float<Bfloat16>(sum);
            }
          }
        }
      });
  return error == cudaSuccess ? 0 : kInvalidValue;
}

}  // namespace

const CublasLt& cublas_lt() {
  static CublasLt lt = {.missing = {},
                        .path = "tests/cuda_on_host",
                        .create = create,
                        .status_name = status_name,
                        .product_create = product_create,
                        .product_destroy = product_destroy,
                        .product_set = product_set,
                        .matrix_create = matrix_create,
                        .matrix_destroy = matrix_destroy,
                        .preference_create = preference_create,
                        .preference_destroy = preference_destroy,
                        .preference_set = preference_set,
                        .find = find,
                        .check = check,
                        .multiply = multiply};
  if (lt.missing != cuda_on_host::products().missing) lt.missing = cuda_on_host::products().missing;  // a test's own doing
  return lt;
}

}  // namespace tileloss::impl::cuda

namespace cuda_on_host {

Products& products() {
  static Products all;
  return all;
}

}  // namespace cuda_on_host
