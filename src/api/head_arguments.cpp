// The matrices of the functions fused with the LM head.
#include <algorithm>
#include <string>

#include "api/arguments.h"

namespace tileloss::impl::api {
namespace {

using std::to_string;

Status check_like(const Problem& p, const char* name, const tileloss_matrix& gradient, const char* of_name,
                  const tileloss_matrix& of) {
  if (!present(gradient)) return {};
  if (Status s = check_matrix(p, name, gradient, Layout::kAnyStrides); !s.ok()) return s;
  if (gradient.dtype != TILELOSS_FLOAT32 && gradient.dtype != of.dtype) {
    return expected(std::string(name) + ".dtype", std::string("float32 or ") + of_name + "'s, " + dtype_name(of.dtype),
                    dtype_name(gradient.dtype));
  }
  if (gradient.rows != of.rows || gradient.cols != of.cols)
    return expected(name, std::string(of_name) + "'s shape " + shape(of.rows, of.cols), shape(gradient.rows, gradient.cols));
  return {};
}

Status check_low_rank(const Problem& p) {
  constexpr std::int64_t kMost = 512;
  const tileloss_args& a = p.args;
  const tileloss_matrix &hidden = a.hidden_r, &head = a.head_r;
  if (!present(hidden) && !present(head)) {
    if (present(a.dhidden_r)) return expected("dhidden_r", "none without hidden_r and head_r", "a tensor");
    if (present(a.dhead_r)) return expected("dhead_r", "none without hidden_r and head_r", "a tensor");
    return {};
  }
  if (!present(hidden)) return expected("hidden_r", "a matrix [N,R], as head_r is given", "none");
  if (!present(head)) return expected("head_r", "a matrix [V,R], as hidden_r is given", "none");
  if (Status s = check_matrix(p, "hidden_r", hidden, Layout::kAnyStrides); !s.ok()) return s;
  if (Status s = check_matrix(p, "head_r", head, Layout::kAnyStrides); !s.ok()) return s;
  if (hidden.rows != a.hidden.rows)
    return expected("hidden_r.rows", "hidden's, " + to_string(a.hidden.rows), to_string(hidden.rows));
  if (head.rows != a.head.rows) return expected("head_r.rows", "head's, " + to_string(a.head.rows), to_string(head.rows));
  if (hidden.cols < 1 || hidden.cols > kMost)
    return expected("hidden_r.cols", "1 to " + to_string(kMost), to_string(hidden.cols));
  if (head.cols != hidden.cols) return expected("head_r.cols", "hidden_r's, " + to_string(hidden.cols), to_string(head.cols));
  if (Status s = check_like(p, "dhidden_r", a.dhidden_r, "hidden_r", hidden); !s.ok()) return s;
  return check_like(p, "dhead_r", a.dhead_r, "head_r", head);
}

}  // namespace

Status resolve_head(Problem& p) {
  const tileloss_args& a = p.args;
  if (present(a.logits)) return expected("logits", "none: " + p.loss->name + " makes them of hidden and head", "a matrix");
  if (present(a.dlogits)) return expected("dlogits", "none: " + p.loss->name + " never holds them", "a matrix");
  const std::pair<const char*, bool> gradients[] = {
      {"dhidden", present(a.dhidden)},     {"dhead", present(a.dhead)},     {"dbias", present(a.dbias)},
      {"dhidden_r", present(a.dhidden_r)}, {"dhead_r", present(a.dhead_r)},
  };
  const bool is_backward = p.pass == TILELOSS_BACKWARD || p.pass == TILELOSS_VALUE_AND_GRAD;
  for (const auto& [name, is_present] : gradients) {
    if (is_present && !is_backward) return expected(name, "none in this pass", "a tensor");
  }
  if (!present(a.hidden)) return expected("hidden", "a float32, bfloat16 or float16 matrix [N,H]", "none");
  if (!present(a.head)) return expected("head", "a float32, bfloat16 or float16 matrix [V,H]", "none");
  if (Status s = choose_device(p, "hidden", device_of(a.hidden)); !s.ok()) return s;
  if (Status s = check_matrix(p, "hidden", a.hidden, Layout::kAnyStrides); !s.ok()) return s;
  if (Status s = check_matrix(p, "head", a.head, Layout::kAnyStrides); !s.ok()) return s;
  if (a.head.rows < 1) return expected("head.rows", ">= 1", to_string(a.head.rows));
  if (a.head.cols != a.hidden.cols) return expected("head.cols", "hidden's, " + to_string(a.hidden.cols), to_string(a.head.cols));
  if (Status s = check_like(p, "dhidden", a.dhidden, "hidden", a.hidden); !s.ok()) return s;
  if (Status s = check_like(p, "dhead", a.dhead, "head", a.head); !s.ok()) return s;
  if (Status s = check_low_rank(p); !s.ok()) return s;
  if (present(a.dbias) && a.dbias.dtype != TILELOSS_FLOAT32 && a.dbias.dtype != a.bias.dtype) {
    return expected("dbias.dtype",
                    present(a.bias) ? std::string("float32 or bias's, ") + dtype_name(a.bias.dtype) : "float32 without a bias",
                    dtype_name(a.dbias.dtype));
  }
  if (is_backward && std::ranges::none_of(gradients, [](const auto& gradient) { return gradient.second; }))
    return expected("dhidden", "it, dhead, dbias, dhidden_r or dhead_r in a backward", "none of them");
  p.rows = a.hidden.rows;
  p.total_columns = a.head.rows;
  p.storage = TILELOSS_FLOAT32;
  const bool both_bfloat16 = a.hidden.dtype == TILELOSS_BFLOAT16 && a.head.dtype == TILELOSS_BFLOAT16;
  const bool bfloat16 = p.linear.compute_dtype == TILELOSS_BFLOAT16 || (p.linear.compute_dtype == TILELOSS_NONE && both_bfloat16);
  p.compute = bfloat16 ? TILELOSS_BFLOAT16 : TILELOSS_FLOAT32;
  return {};
}

Status resolve_teacher_head(Problem& p) {
  const tileloss_matrix &hidden = p.args.teacher_hidden, &head = p.args.teacher_head;
  if (!present(hidden)) return expected("teacher_hidden", "a float32, bfloat16 or float16 matrix [N,G]", "none");
  if (!present(head)) return expected("teacher_head", "a float32, bfloat16 or float16 matrix [V,G]", "none");
  if (Status s = check_matrix(p, "teacher_hidden", hidden, Layout::kAnyStrides); !s.ok()) return s;
  if (Status s = check_matrix(p, "teacher_head", head, Layout::kAnyStrides); !s.ok()) return s;
  if (hidden.rows != p.rows) return expected("teacher_hidden.rows", "hidden's, " + to_string(p.rows), to_string(hidden.rows));
  if (head.rows != p.total_columns)
    return expected("teacher_head.rows", "head's, " + to_string(p.total_columns), to_string(head.rows));
  if (head.cols != hidden.cols)
    return expected("teacher_head.cols", "teacher_hidden's, " + to_string(hidden.cols), to_string(head.cols));
  const bool both_bfloat16 = hidden.dtype == TILELOSS_BFLOAT16 && head.dtype == TILELOSS_BFLOAT16;
  if (p.linear.compute_dtype == TILELOSS_NONE && !both_bfloat16) p.compute = TILELOSS_FLOAT32;
  return {};
}

}  // namespace tileloss::impl::api
