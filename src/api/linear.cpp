#include "api/linear.h"

#include <string>

#include "api/arguments.h"
#include "backends/cpu/isa/isa.h"

namespace tileloss::api {
namespace {

using std::to_string;

Status check_like(const char* name, const tileloss_matrix& gradient, const char* of_name, const tileloss_matrix& of) {
  if (!present(gradient)) return {};
  if (Status s = check_matrix(name, gradient, Layout::kAnyStrides); !s.ok()) return s;
  if (gradient.dtype != TILELOSS_FLOAT32 && gradient.dtype != of.dtype) {
    return expected(std::string(name) + ".dtype", std::string("float32 or ") + of_name + "'s, " + dtype_name(of.dtype),
                    dtype_name(gradient.dtype));
  }
  if (gradient.rows != of.rows || gradient.cols != of.cols)
    return expected(name, std::string(of_name) + "'s shape " + shape(of.rows, of.cols), shape(gradient.rows, gradient.cols));
  return {};
}

cpu::Operand operand(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
cpu::Operand operand(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride, 0}; }
cpu::OutputMatrix output(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
cpu::OutputMatrix output(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride}; }

}  // namespace

Status resolve_linear(Problem& p) {
  const tileloss_args& a = p.args;
  if (present(a.logits)) return expected("logits", "none: " + p.loss->name + " makes them of hidden and head", "a matrix");
  if (present(a.dlogits)) return expected("dlogits", "none: " + p.loss->name + " never holds them", "a matrix");
  const std::pair<const char*, bool> gradients[] = {
      {"dhidden", present(a.dhidden)}, {"dhead", present(a.dhead)}, {"dbias", present(a.dbias)}};
  const bool is_backward = p.pass == TILELOSS_BACKWARD || p.pass == TILELOSS_VALUE_AND_GRAD;
  for (const auto& [name, is_present] : gradients) {
    if (is_present && !is_backward) return expected(name, "none in this pass", "a tensor");
  }
  if (!present(a.hidden)) return expected("hidden", "a float32, bfloat16 or float16 matrix [N,H]", "none");
  if (!present(a.head)) return expected("head", "a float32, bfloat16 or float16 matrix [V,H]", "none");
  if (Status s = check_matrix("hidden", a.hidden, Layout::kAnyStrides); !s.ok()) return s;
  if (Status s = check_matrix("head", a.head, Layout::kAnyStrides); !s.ok()) return s;
  if (a.head.rows < 1) return expected("head.rows", ">= 1", to_string(a.head.rows));
  if (a.head.cols != a.hidden.cols) return expected("head.cols", "hidden's, " + to_string(a.hidden.cols), to_string(a.head.cols));
  if (Status s = check_like("dhidden", a.dhidden, "hidden", a.hidden); !s.ok()) return s;
  if (Status s = check_like("dhead", a.dhead, "head", a.head); !s.ok()) return s;
  if (present(a.dbias) && a.dbias.dtype != TILELOSS_FLOAT32 && a.dbias.dtype != a.bias.dtype) {
    return expected("dbias.dtype",
                    present(a.bias) ? std::string("float32 or bias's, ") + dtype_name(a.bias.dtype) : "float32 without a bias",
                    dtype_name(a.dbias.dtype));
  }
  if (is_backward && !gradients[0].second && !gradients[1].second && !gradients[2].second)
    return expected("dhidden", "it, dhead or dbias in a backward", "none of them");
  if (a.compute_dtype != TILELOSS_NONE && a.compute_dtype != TILELOSS_FLOAT32 && a.compute_dtype != TILELOSS_BFLOAT16)
    return expected("compute_dtype", "none, float32 or bfloat16", dtype_name(a.compute_dtype));
  if (a.accumulate != 0 && a.accumulate != 1) return expected("accumulate", "0 or 1", to_string(a.accumulate));
  p.rows = a.hidden.rows;
  p.total_columns = a.head.rows;
  p.storage = cpu::kStorageFloat32;
  const bool both_bfloat16 = a.hidden.dtype == TILELOSS_BFLOAT16 && a.head.dtype == TILELOSS_BFLOAT16;
  const bool bfloat16 = a.compute_dtype == TILELOSS_BFLOAT16 || (a.compute_dtype == TILELOSS_NONE && both_bfloat16);
  p.compute = bfloat16 ? cpu::Compute::kBfloat16 : cpu::Compute::kFloat32;
  return {};
}

cpu::LinearJob linear_job(const Problem& p, const tileloss_plan& plan, const LossContext& context, const std::int64_t* targets,
                          std::byte* workspace) {
  const tileloss_args& a = p.args;
  cpu::LinearJob job;
  job.kernels = &cpu::kernels(plan.isa);
  job.shape = linear_shape(p, plan);
  job.layout = cpu::linear_layout(job.shape, job.kernels->matmul);
  if (present(a.hidden)) job.hidden = operand(a.hidden);
  if (present(a.head)) job.head = operand(a.head);
  if (present(a.bias)) job.bias = operand(a.bias);
  job.transform = make_transform(p, context.temperature);
  job.sums = p.sums;
  job.class_weights = class_weights(p);
  job.targets = targets;
  job.from_saved_state = !p.needs_forward;
  job.wants_gradients = p.needs_backward;
  job.dhidden = output(a.dhidden);
  job.dhead = output(a.dhead);
  job.dbias = output(a.dbias);
  job.accumulate = a.accumulate != 0;
  job.workspace = workspace;
  return job;
}

}  // namespace tileloss::api
