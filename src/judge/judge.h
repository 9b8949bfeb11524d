/* The one C function of libtileloss_judge.so, which the Python package's commands and tileloss.testing call: it draws, runs,
 * judges and times. What it is asked, and what it says, is JSON; tensors go by pointer. Names of requests, their fields and their
 * events: requests.h. */
#ifndef TILELOSS_JUDGE_JUDGE_H_
#define TILELOSS_JUDGE_JUDGE_H_

#include <stdint.h>
#include <tileloss/tileloss.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tileloss_judge_tensor {
  const char* file; /* the path of the config that it belongs to; "": an output that is to be judged */
  const char* name;
  const char* dtype; /* as safetensors has it: F32, BF16, F16, I64, I32, U8, BOOL */
  const int64_t* shape;
  int64_t rank;
  const void* data; /* contiguous, row by row */
} tileloss_judge_tensor;

/* Who is told. An event is a JSON object with the member "event"; it and a tensor are valid during the call alone. Calls come
 * from one thread at a time, progress from any. */
typedef struct tileloss_judge_answer {
  void* context;
  void (*event)(void* context, const char* json);
  void (*tensor)(void* context, const tileloss_judge_tensor* tensor);
} tileloss_judge_answer;

/* 0: passed or done, 1: a check failed, 2: the request is wrong, 3: memory, device or file system; at 2 and 3 the event "error"
 * has said why. Requests of one process run one after another. */
TILELOSS_API int tileloss_judge(const char* request, const tileloss_judge_tensor* tensors, int64_t count,
                                const tileloss_judge_answer* answer);

#ifdef __cplusplus
}
#endif

#endif /* TILELOSS_JUDGE_JUDGE_H_ */
