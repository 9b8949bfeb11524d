#include <stdio.h>
#include <tileloss/tileloss.h>

int main(void) {
  const float logits[2 * 4] = {1, 2, 3, 4, 2, 0, 0, 0};  // 2 tokens, a vocabulary of 4
  const int64_t labels[2] = {3, 0};
  float loss = 0, dlogits[2 * 4];

  const tileloss_args args = {.struct_size = sizeof args,
                              .logits = tileloss_make_matrix(logits, TILELOSS_FLOAT32, 2, 4, 4),
                              .labels = tileloss_make_vector(labels, TILELOSS_INT64, 2),
                              .loss = tileloss_make_vector(&loss, TILELOSS_FLOAT32, 1),
                              .dlogits = tileloss_make_matrix(dlogits, TILELOSS_FLOAT32, 2, 4, 4)};
  tileloss_cross_entropy_options options;
  tileloss_cross_entropy_options_init(&options);
  options.label_smoothing = 0.1;

  if (tileloss_cross_entropy_value_and_grad(&args, &options, NULL, NULL) != TILELOSS_OK) {
    fprintf(stderr, "%s\n", tileloss_last_error());
    return 1;
  }
  printf("loss %.4f, dlogits[0][3] %.4f\n", loss, dlogits[3]);
  return 0;
}
