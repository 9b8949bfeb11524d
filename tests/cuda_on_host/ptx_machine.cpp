#include "tests/cuda_on_host/ptx_machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/cuda_on_host/streams.h"

namespace cuda_on_host {
namespace {

constexpr std::size_t kWarp = 32;

std::size_t words(std::size_t bytes) { return (bytes + 15) / 16 * 2; }
std::uint64_t address_of(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }
std::uint64_t low_bits(std::uint64_t bits, std::size_t bytes) { return bytes == 8 ? bits : bits & ((1ull << 8 * bytes) - 1); }

}  // namespace

PtxMachine::PtxMachine(const PtxKernel& kernel, const Kernel& launch)
    : kernel_(kernel),
      threads_(launch.block.x),
      cluster_(launch.cluster),
      blocks_(launch.grid.x),
      shared_bytes_(8 * words(kernel.shared_bytes + launch.dynamic_bytes)),
      parameters_(words(kernel.parameter_bytes)),
      shared_(shared_bytes_ / 8 * cluster_),
      all_(std::size_t{threads_} * cluster_) {
  bool fits = kernel.parameters.size() == launch.arguments.size();
  for (std::size_t i = 0; fits && i < kernel.parameters.size(); ++i) {
    const auto& parameter = kernel.parameters[i];
    fits = parameter.bytes == launch.arguments[i].size();
    if (fits)
      std::memcpy(reinterpret_cast<std::byte*>(parameters_.data()) + parameter.offset, launch.arguments[i].data(),
                  parameter.bytes);
  }
  const bool is_line = launch.grid.y * launch.grid.z * launch.block.y * launch.block.z == 1 && threads_ % kWarp == 0;
  if (!fits || !is_line) stop(all_[0], fits ? "a launch that is not a line of whole warps" : "other parameters than the host's");
  const std::size_t count = kernel.registers.size(), local_words = words(kernel.local_bytes);
  registers_.resize(count * all_.size());
  local_.assign(local_words * all_.size(), ~0ull);
  for (std::size_t k = 0; k < all_.size(); ++k) {
    all_[k].registers = registers_.data() + count * k;
    all_[k].block = static_cast<std::uint32_t>(k / threads_);
    std::copy(kernel.registers.begin(), kernel.registers.end(), all_[k].registers);
    for (const std::uint32_t place : kernel.parameter_registers) all_[k].registers[place] += address_of(parameters_.data());
    const std::uint64_t special[] = {k % threads_,
                                     threads_,
                                     0,
                                     blocks_,
                                     all_[k].block,
                                     cluster_,
                                     k % threads_ % kWarp,
                                     address_of(local_.data() + local_words * k)};
    static_assert(sizeof special == 8 * PtxKernel::kSpecials);
    std::copy(std::begin(special), std::end(special), all_[k].registers);
  }
}

void PtxMachine::run() {
  for (std::uint32_t block = 0; block < blocks_; block += cluster_) run_cluster(block);
}

void PtxMachine::run_cluster(std::uint32_t first_block) {
  std::fill(shared_.begin(), shared_.end(), ~0ull);
  for (Thread& thread : all_) {
    thread.registers[PtxKernel::kBlock] = first_block + thread.block;
    thread.at = 0;
    thread.wait = Wait::kNone;
  }
  do {
    for (Thread& thread : all_) {
      if (thread.wait == Wait::kNone) run_thread(thread);
    }
  } while (exchange_lanes() || pass_barriers() || pass_cluster());
  for (const Thread& thread : all_) {
    if (thread.wait != Wait::kGone) stop(thread, "deadlock, as not all threads come to it");
  }
}

void PtxMachine::run_thread(Thread& thread) {
  std::uint64_t* const r = thread.registers;
  for (;;) {
    const PtxInstruction& i = kernel_.code[thread.at];
    if (i.has_predicate && ((r[i.predicate] & 1) != 0) == i.is_negated) {
      ++thread.at;
    } else if (i.kind == PtxKind::kCompute) {
      r[i.to[0]] = i.function(r[i.from[0]], r[i.from[1]], r[i.from[2]]);
      ++thread.at;
    } else if (i.kind == PtxKind::kBranch) {
      thread.at = i.target;
    } else {
      if (!step(thread, i)) return;
      ++thread.at;
    }
  }
}

// False where it waits.
bool PtxMachine::step(Thread& thread, const PtxInstruction& i) {
  std::uint64_t* const r = thread.registers;
  switch (i.kind) {
    case PtxKind::kSplit:
    case PtxKind::kJoin: {
      const std::size_t bytes = i.bytes / i.count;
      std::uint64_t joined = 0;
      for (std::size_t k = 0; k < i.count; ++k) {
        joined |= low_bits(r[i.from[k]], bytes) << 8 * bytes * k;
        if (i.kind == PtxKind::kSplit) r[i.to[k]] = low_bits(r[i.from[0]] >> 8 * bytes * k, bytes);
      }
      if (i.kind == PtxKind::kJoin) r[i.to[0]] = joined;
      return true;
    }
    case PtxKind::kLoad: {
      const std::byte* const from = place(thread, i, std::size_t{i.bytes} * i.count);
      for (std::size_t k = 0; k < i.count; ++k) {
        std::uint64_t bits = 0;
        std::memcpy(&bits, from + i.bytes * k, i.bytes);
        const unsigned unused = 64 - 8u * i.bytes;
        r[i.to[k]] = i.is_signed ? static_cast<std::uint64_t>(static_cast<std::int64_t>(bits << unused) >> unused) : bits;
      }
      return true;
    }
    case PtxKind::kStore: store(thread, i); return true;
    case PtxKind::kAtomic: {
      std::byte* const at = place(thread, i, i.bytes);
      std::uint64_t before = 0;
      std::memcpy(&before, at, i.bytes);
      const std::uint64_t after = i.function(before, r[i.from[1]], r[i.from[2]]);
      std::memcpy(at, &after, i.bytes);
      r[i.to[0]] = before;
      return true;
    }
    case PtxKind::kCopy:
      std::memcpy(shared_place(thread, static_cast<std::uint32_t>(r[i.from[1]]), 16), place(thread, i, 16), 16);
      return true;
    case PtxKind::kPeer: {
      const std::uint64_t offset = r[i.from[0]] - address_of(shared_.data()) - shared_bytes_ * thread.block;
      const std::uint64_t rank = static_cast<std::uint32_t>(r[i.from[1]]);
      if (rank >= cluster_ || offset >= shared_bytes_) stop(thread, "a peer that the cluster lacks, or of no shared memory");
      r[i.to[0]] = address_of(shared_.data()) + shared_bytes_ * rank + offset;
      return true;
    }
    case PtxKind::kGeneric: r[i.to[0]] = r[i.from[0]] + address_of(shared_.data()) + shared_bytes_ * thread.block; return true;
    case PtxKind::kArrive: thread.has_arrived = true; return true;
    case PtxKind::kWait:
      if (!thread.has_arrived) stop(thread, "a wait for the cluster without arrival");
      thread.wait = Wait::kCluster;
      return false;
    case PtxKind::kBarrier: thread.wait = Wait::kBarrier; return false;
    case PtxKind::kShuffle: thread.wait = Wait::kLanes; return false;
    case PtxKind::kReturn: thread.wait = Wait::kGone; return false;
    default: return true;
  }
}

std::byte* PtxMachine::shared_place(const Thread& thread, std::uint64_t at, std::size_t bytes) const {
  if (at % bytes != 0) stop(thread, "an address that is not aligned");
  if (at + bytes > shared_bytes_) stop(thread, "shared memory that the block does not have");
  return reinterpret_cast<std::byte*>(const_cast<std::uint64_t*>(shared_.data())) + shared_bytes_ * thread.block + at;
}

std::byte* PtxMachine::place(const Thread& thread, const PtxInstruction& i, std::size_t bytes) {
  const std::uint64_t at = thread.registers[i.from[0]] + static_cast<std::uint64_t>(i.offset);
  if (i.is_shared && i.kind != PtxKind::kCopy) return shared_place(thread, static_cast<std::uint32_t>(at), bytes);
  if (at % bytes != 0) stop(thread, "an address that is not aligned");
  if (at < found_begin_ || at + bytes > found_end_) {
    find(at);
    if (at < found_begin_ || at + bytes > found_end_) stop(thread, "an address of no memory");
  }
  return reinterpret_cast<std::byte*>(at);
}

// What of memory has the address: a piece of the devices', or the launch's own.
void PtxMachine::find(std::uint64_t at) {
  if (const auto* const piece = devices().find(reinterpret_cast<void*>(at)); piece != nullptr) {
    found_begin_ = piece->first, found_end_ = piece->first + piece->second.bytes;
  }
  for (const std::vector<std::uint64_t>* const own : {&parameters_, &shared_, &local_}) {
    const std::uint64_t begin = address_of(own->data());
    if (at >= begin && at < begin + 8 * own->size()) found_begin_ = begin, found_end_ = begin + 8 * own->size();
  }
}

void PtxMachine::store(Thread& thread, const PtxInstruction& i) {
  std::byte* const to = place(thread, i, std::size_t{i.bytes} * i.count);
  using Type = PtxStore::Type;
  const Type word = i.is_pair ? Type::kPair : i.bytes == 2 ? Type::kHalf : i.count == 4 ? Type::kFloat : Type::kWord;
  const Type type = !i.is_real ? word : i.bytes == 4 ? Type::kFloat : Type::kDouble;
  const bool is_shared = i.is_shared || address_of(to) - address_of(shared_.data()) < 8 * shared_.size();
  const bool may_round = i.is_real || i.bytes == 2 || i.bytes == 4;
  for (std::size_t k = 0; k < i.count; ++k) {
    std::memcpy(to + i.bytes * k, &thread.registers[i.to[k]], i.bytes);
    if (!is_shared && may_round) stores_.push_back({type, to + i.bytes * k});
  }
}

bool PtxMachine::all_are_at(std::size_t first, std::size_t count, Wait wait) const {
  return std::all_of(all_.begin() + static_cast<std::ptrdiff_t>(first), all_.begin() + static_cast<std::ptrdiff_t>(first + count),
                     [wait](const Thread& thread) { return thread.wait == wait; });
}
void PtxMachine::wake(std::size_t first, std::size_t count) {
  for (std::size_t k = first; k < first + count; ++k) {
    all_[k].wait = Wait::kNone;
    ++all_[k].at;
  }
}

bool PtxMachine::exchange_lanes() {
  bool have = false;
  for (std::size_t first = 0; first < all_.size(); first += kWarp) {
    if (!all_are_at(first, kWarp, Wait::kLanes)) continue;
    const PtxInstruction& i = kernel_.code[all_[first].at];
    std::uint64_t given[kWarp];
    for (std::size_t k = 0; k < kWarp; ++k) {
      const Thread& thread = all_[first + k];
      const auto operand = [&](int which) { return static_cast<std::uint32_t>(thread.registers[i.from[which]]); };
      if (thread.at != all_[first].at) stop(thread, "lanes of a warp at two shuffles");
      if (operand(1) >= kWarp || operand(2) != kWarp - 1 || operand(3) != ~0u) stop(thread, "a shuffle of some of the lanes");
      given[k] = operand(0);
    }
    for (std::size_t k = 0; k < kWarp; ++k) {
      std::uint64_t* const r = all_[first + k].registers;
      r[i.to[0]] = given[k ^ r[i.from[1]] % kWarp];
    }
    wake(first, kWarp);
    have = true;
  }
  return have;
}

bool PtxMachine::pass_barriers() {
  bool have = false;
  for (std::size_t first = 0; first < all_.size(); first += threads_) {
    if (!all_are_at(first, threads_, Wait::kBarrier)) continue;
    for (std::size_t k = first; k < first + threads_; ++k) {
      if (all_[k].at != all_[k / kWarp * kWarp].at) stop(all_[k], "lanes of a warp at two barriers");
    }
    wake(first, threads_);
    have = true;
  }
  return have;
}

bool PtxMachine::pass_cluster() {
  if (!all_are_at(0, all_.size(), Wait::kCluster)) return false;
  for (Thread& thread : all_) {
    if (thread.at != all_[0].at) stop(thread, "threads of a cluster at two waits");
    thread.has_arrived = false;
  }
  wake(0, all_.size());
  return true;
}

void PtxMachine::stop(const Thread& thread, const char* what) const {
  std::fprintf(stderr, "cuda_on_host: the PTX of %s: %s: %s\n", kernel_.name.c_str(), what,
               kernel_.statements[kernel_.code[thread.at].statement].c_str());
  std::abort();
}

}  // namespace cuda_on_host
