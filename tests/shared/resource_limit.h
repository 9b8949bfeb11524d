// Limits of this process that hold while they live, and for the children that it starts meanwhile.
#ifndef TILELOSS_TESTS_SHARED_RESOURCE_LIMIT_H_
#define TILELOSS_TESTS_SHARED_RESOURCE_LIMIT_H_

#include <sys/resource.h>

#include <csignal>

namespace tileloss::test {

class ResourceLimit {
 public:
  ResourceLimit(const ResourceLimit&) = delete;
  ResourceLimit& operator=(const ResourceLimit&) = delete;

 protected:
  ResourceLimit(__rlimit_resource_t resource, rlim_t value) : resource_(resource) {
    getrlimit(resource_, &earlier_);
    rlimit limit = earlier_;
    limit.rlim_cur = value;
    setrlimit(resource_, &limit);
  }
  ~ResourceLimit() { setrlimit(resource_, &earlier_); }

 private:
  __rlimit_resource_t resource_;
  rlimit earlier_{};
};

// A file that is written ends at `bytes`: the write stops half-way, as on a disk that fills up.
class FileSizeLimit : private ResourceLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : ResourceLimit(RLIMIT_FSIZE, bytes), earlier_handler_(std::signal(SIGXFSZ, SIG_IGN)) {}
  ~FileSizeLimit() { std::signal(SIGXFSZ, earlier_handler_); }

 private:
  void (*earlier_handler_)(int);
};

class AddressSpaceLimit : private ResourceLimit {
 public:
  explicit AddressSpaceLimit(rlim_t bytes) : ResourceLimit(RLIMIT_AS, bytes) {}
};

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_SHARED_RESOURCE_LIMIT_H_
