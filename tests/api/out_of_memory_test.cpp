// Calls where the heap is exhausted: a status and a message, in the library as a program loads it.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <thread>

#include "tests/api/calls.h"
#include "tests/shared/child_process.h"

namespace tileloss::test {
namespace {

class NoMoreAddresses {
 public:
  NoMoreAddresses() {
    getrlimit(RLIMIT_AS, &earlier_);
    const rlimit none{1, earlier_.rlim_max};
    setrlimit(RLIMIT_AS, &none);
  }
  ~NoMoreAddresses() { setrlimit(RLIMIT_AS, &earlier_); }
  NoMoreAddresses(const NoMoreAddresses&) = delete;
  NoMoreAddresses& operator=(const NoMoreAddresses&) = delete;

 private:
  rlimit earlier_{};
};

// All that malloc has left, in the calling thread's arena too, until it is destroyed.
class ExhaustedHeap {
 public:
  ExhaustedHeap() {
    for (std::size_t bytes = 1 << 20; bytes >= sizeof(Block); bytes /= 2) {
      while (void* memory = std::malloc(bytes)) last_ = new (memory) Block{last_};
    }
  }
  ~ExhaustedHeap() {
    while (last_ != nullptr) std::free(std::exchange(last_, last_->before));
  }
  ExhaustedHeap(const ExhaustedHeap&) = delete;
  ExhaustedHeap& operator=(const ExhaustedHeap&) = delete;

 private:
  struct Block {
    Block* before;
  };
  const NoMoreAddresses limit_;
  Block* last_ = nullptr;
};

TEST(OutOfMemory, AThreadsFirstFailuresGiveAStatusAndAMessage) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's own malloc ends the process";
#endif
  const auto child = [] {
    const std::filesystem::path beside = std::filesystem::read_symlink("/proc/self/exe").replace_filename("libtileloss.so");
    void* const library = dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    const auto call = reinterpret_cast<decltype(&tileloss_call)>(dlsym(library, "tileloss_call"));
    const auto last_error = reinterpret_cast<decltype(&tileloss_last_error)>(dlsym(library, "tileloss_last_error"));
    const auto refused_for = [&](std::string_view message) {
      tileloss_args args{};  // of no size
      const tileloss_status status = call("cross_entropy", TILELOSS_FORWARD, &args, nullptr, nullptr, nullptr);
      const std::string_view said = last_error();
      return message.empty() ? status == TILELOSS_INVALID_ARGUMENT && said.rfind("args.struct_size: expected ", 0) == 0
                             : status == TILELOSS_OUT_OF_MEMORY && said == message;
    };
    bool is_right = true;
    std::thread([&] {
      for (int time = 0; time < 2; ++time) {  // with no message kept before, and with one
        {
          const ExhaustedHeap exhausted;
          is_right = is_right && refused_for("out of memory");
        }
        is_right = is_right && refused_for("");
      }
    }).join();
    return is_right;
  };
  EXPECT_EQ(exit_code_of_child(child), 0);
}

}  // namespace
}  // namespace tileloss::test
