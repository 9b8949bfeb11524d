// A file descriptor that is closed with its owner.
#ifndef TILELOSS_SUPPORT_DESCRIPTOR_H_
#define TILELOSS_SUPPORT_DESCRIPTOR_H_

#include <unistd.h>

namespace tileloss::tools {

class Descriptor {
 public:
  // -1: none.
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  ~Descriptor() { reset(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return descriptor_; }
  void reset(int descriptor = -1) {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = descriptor;
  }

 private:
  int descriptor_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_DESCRIPTOR_H_
