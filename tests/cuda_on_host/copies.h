// A thread's copies into shared memory that go on while it does. Each is done at once, or no earlier than it must be.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "tests/cuda_on_host/random.h"

namespace cuda_on_host {

class Copies {
 public:
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
    unsigned group = 0;
  };

  void begin(Copy copy, Random& random) {
    copy.group = groups_;
    if (random.below(2) == 0) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      late_.push_back(copy);
    }
  }
  void end_group() { ++groups_; }
  // For all groups that have ended but the last `others`; in any order.
  void wait(unsigned others, Random& random) {
    random.shuffle(late_.data(), static_cast<unsigned>(late_.size()));
    std::erase_if(late_, [&](const Copy& copy) {
      const bool is_due = copy.group + others < groups_;
      if (is_due) std::memcpy(copy.to, copy.from, copy.bytes);
      return is_due;
    });
  }

 private:
  std::vector<Copy> late_;
  unsigned groups_ = 0;  // that have ended
};

}  // namespace cuda_on_host
