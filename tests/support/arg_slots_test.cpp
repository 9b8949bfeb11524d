#include "support/arg_slots.h"

#include <gtest/gtest.h>

#include <string>

namespace tileloss::tools {
namespace {

TEST(ArgSlots, AHeadThatLiesAsHVShowsItsColumnsAsRows) {
  tileloss_args args;
  tileloss_args_init(&args);
  float values[6] = {};
  args.head = tileloss_make_matrix(values, TILELOSS_FLOAT32, 3, 2, 1);
  args.head.col_stride = 3;
  args.dhidden = tileloss_make_matrix(values, TILELOSS_FLOAT32, 3, 2, 2);
  int seen = 0;
  for_each_tensor(args, TILELOSS_VALUE_AND_GRAD, [&](TensorView& view) {
    const bool is_head = view.name == std::string("head");
    EXPECT_EQ(view.rows, is_head ? 2 : 3);
    EXPECT_EQ(view.cols, is_head ? 3 : 2);
    EXPECT_EQ(view.stride, is_head ? 3 : 2);
    view.stride = 17;
    ++seen;
  });
  EXPECT_EQ(seen, 2);
  EXPECT_EQ(args.head.row_stride, 1);
  EXPECT_EQ(args.head.col_stride, 17);
  EXPECT_EQ(args.dhidden.row_stride, 17);
  EXPECT_EQ(args.dhidden.col_stride, 1);
}

}  // namespace
}  // namespace tileloss::tools
