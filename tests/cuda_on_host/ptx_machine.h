// Runs a kernel's PTX on the host's memory, a thread after the other from barrier to barrier. It stops aloud where a barrier or a
// shuffle is not what PTX asks for, at addresses that are not aligned, and at memory that is not there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/cuda_on_host/ptx_program.h"
#include "tests/cuda_on_host/threads.h"

namespace cuda_on_host {

// What was stored as such a number, outside of shared memory that is addressed as that.
struct PtxStore {
  enum class Type : std::uint8_t { kFloat, kDouble, kHalf, kPair, kWord } type;  // a word: of who knows what
  std::byte* at;
};

class PtxMachine {
 public:
  PtxMachine(const PtxKernel& kernel, const Kernel& launch);
  void run();
  const std::vector<PtxStore>& stores() const { return stores_; }

 private:
  enum class Wait : std::uint8_t { kNone, kBarrier, kLanes, kCluster, kGone };
  struct Thread {
    std::uint64_t* registers = nullptr;
    std::size_t at = 0;
    std::uint32_t block = 0;
    Wait wait = Wait::kNone;
    bool has_arrived = false;
  };

  void run_cluster(std::uint32_t first_block);
  void run_thread(Thread& thread);
  bool step(Thread& thread, const PtxInstruction& i);
  std::byte* place(const Thread& thread, const PtxInstruction& i, std::size_t bytes);
  void find(std::uint64_t at);
  std::byte* shared_place(const Thread& thread, std::uint64_t at, std::size_t bytes) const;
  void store(Thread& thread, const PtxInstruction& i);
  // Whether any could go on.
  bool exchange_lanes();
  bool pass_barriers();
  bool pass_cluster();
  bool all_are_at(std::size_t first, std::size_t count, Wait wait) const;
  void wake(std::size_t first, std::size_t count);
  [[noreturn]] void stop(const Thread& thread, const char* what) const;

  const PtxKernel& kernel_;
  const std::uint32_t threads_, cluster_, blocks_;
  const std::size_t shared_bytes_;  // a block's
  std::vector<std::uint64_t> registers_, parameters_, shared_, local_;
  std::vector<Thread> all_;
  std::vector<PtxStore> stores_;
  std::uint64_t found_begin_ = 0, found_end_ = 0;  // the memory that was found last
};

}  // namespace cuda_on_host
