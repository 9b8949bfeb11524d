// PTX as nvcc writes it (CUDA 13): kernels, as instructions on numbered registers. What is not known here is refused aloud.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cuda_on_host {

// Of three registers' bits, those of the result. Registers above an operand's width hold anything.
using PtxFunction = std::uint64_t (*)(std::uint64_t a, std::uint64_t b, std::uint64_t c);
// By an instruction's whole name; null where it is none that only computes. `atom.add.u32` is of what is there and an operand.
PtxFunction ptx_function(const std::string& name);

enum class PtxKind : std::uint8_t {
  kCompute,
  kSplit,  // a register into several, and back
  kJoin,
  kLoad,
  kStore,
  kAtomic,
  kCopy,  // cp.async, done at once
  kBranch,
  kBarrier,
  kShuffle,
  kArrive,  // at the cluster's barrier
  kWait,
  kPeer,     // mapa
  kGeneric,  // the address of a block's shared memory
  kNothing,
  kReturn
};

struct PtxInstruction {
  PtxKind kind = PtxKind::kNothing;
  std::uint8_t bytes = 0, count = 1;                                            // of a number, and how many
  bool is_shared = false, is_signed = false, is_real = false, is_pair = false;  // a pair: two of 16 bits, rounded
  bool has_predicate = false, is_negated = false;
  std::uint32_t predicate = 0, target = 0;
  std::uint32_t to[4] = {}, from[4] = {};  // registers; an address is the first of `from`, what is stored there is in `to`
  std::uint32_t statement = 0;
  std::int64_t offset = 0;
  PtxFunction function = nullptr;
};

struct PtxKernel {
  // The first registers.
  enum Special : std::uint32_t { kThread, kThreads, kBlock, kBlocks, kRank, kCluster, kLane, kLocal, kSpecials };
  struct Parameter {
    std::string name;
    std::size_t offset, bytes;
  };

  std::string name;
  std::vector<Parameter> parameters;
  std::vector<PtxInstruction> code;
  std::vector<std::string> statements;
  std::vector<std::uint64_t> registers;            // what is in them at first: constants, each in one of its own
  std::vector<std::uint32_t> parameter_registers;  // those that hold an offset among the parameters
  std::size_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;  // what a launch gives of shared memory is behind its own
};

class PtxFiles {
 public:
  explicit PtxFiles(const std::string& folder);
  // By its name in the host's symbols; null where there is none.
  const PtxKernel* find(const std::string& symbol);
  std::size_t kernels() const { return entries_.size(); }
  std::vector<std::string> names() const;

 private:
  struct Variable {
    std::size_t bytes, alignment;
  };
  struct File {
    std::string name, text;
    std::map<std::string, Variable> shared;
  };
  struct Entry {
    std::size_t file, at;
  };
  friend class PtxParser;

  std::vector<File> files_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, PtxKernel> kernels_;  // those that were asked for
};

}  // namespace cuda_on_host
