// Exits with 0 if the instruction it is told to execute is illegal on this machine: the control of the emulated suites, which
// prove nothing where every instruction runs.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>

int main(int argc, char** argv) {
  std::signal(SIGILL, [](int) { _exit(0); });
#if defined(__aarch64__)
  if (argc == 2 && std::strcmp(argv[1], "neon_bf16") == 0) {
    asm volatile(".inst 0x2e40fc00" : : : "v0");  // bfdot v0.2s, v0.4h, v0.4h
  } else {
    std::fprintf(stderr, "usage: foreign_instruction neon_bf16\n");
    return 2;
  }
#else
  if (argc == 2 && std::strcmp(argv[1], "avx2") == 0) {
    asm volatile("vpxor %%ymm0, %%ymm0, %%ymm0" : : : "xmm0");
  } else if (argc == 2 && std::strcmp(argv[1], "avx512") == 0) {
    asm volatile("vpxord %%zmm16, %%zmm16, %%zmm16" : : : "memory");
  } else {
    std::fprintf(stderr, "usage: foreign_instruction avx2|avx512\n");
    return 2;
  }
#endif
  std::printf("%s runs on this machine\n", argv[1]);
  return 1;
}
