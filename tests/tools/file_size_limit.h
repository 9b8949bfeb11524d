// While one lives, a file that this process writes ends at `bytes`: the write stops half-way, as on a disk that fills up.
#ifndef TILELOSS_TESTS_TOOLS_FILE_SIZE_LIMIT_H_
#define TILELOSS_TESTS_TOOLS_FILE_SIZE_LIMIT_H_

#include <sys/resource.h>

#include <csignal>

namespace tileloss::test {

class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : earlier_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &earlier_limit_);
    rlimit limit = earlier_limit_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &earlier_limit_);
    std::signal(SIGXFSZ, earlier_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*earlier_handler_)(int);
  rlimit earlier_limit_{};
};

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_TOOLS_FILE_SIZE_LIMIT_H_
