/* libtileloss_judge.so as whoever has nothing but a C compiler calls it: LIBRARY REQUEST; prints the events, exits with the code.
 */
#include "judge/judge.h"

#include <dlfcn.h>
#include <stdio.h>

static void print(void* context, const char* json) {
  (void)context;
  puts(json);
}

static void ignore(void* context, const tileloss_judge_tensor* tensor) {
  (void)context;
  (void)tensor;
}

int main(int argc, char** argv) {
  void* library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (library == NULL) return 4;
  int (*judge)(const char*, const tileloss_judge_tensor*, int64_t, const tileloss_judge_answer*);
  *(void**)&judge = dlsym(library, "tileloss_judge");
  const tileloss_judge_answer answer = {NULL, print, ignore};
  return judge(argv[2], NULL, 0, &answer);
}
