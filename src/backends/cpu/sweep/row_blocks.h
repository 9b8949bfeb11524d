// What the drivers that hand rows to threads share: the walk over blocks of rows, and a row's scratch.
#pragma once

#include <tileloss/tileloss.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/sweep/row_kernel.h"
#include "backends/cpu/threads/executor.h"
#include "backends/cpu/threads/floating_point.h"

namespace tileloss::impl::cpu {

inline std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// A thread's memory for one row of logits.
struct RowScratch {
  std::int64_t vocab_block;   // of the whole row where that is shorter
  float* operands = nullptr;  // null without a softcap
  float* stash = nullptr;     // null unless asked for, as its references
  double* references = nullptr;

  RowScratch(std::byte* at, bool has_stash, std::int64_t columns, std::int64_t block, bool has_softcap)
      : vocab_block(used_block(columns, block)) {
    if (has_softcap) {
      operands = reinterpret_cast<float*>(at);
      at += operand_bytes(columns, block, true);
    }
    if (has_stash) {
      stash = reinterpret_cast<float*>(at);
      references = reinterpret_cast<double*>(at + stash_bytes(columns));
    }
  }

  // A multiple of 64.
  static std::int64_t bytes(bool has_stash, std::int64_t columns, std::int64_t block, bool has_softcap) {
    const std::int64_t blocks = (columns + block - 1) / block;
    return operand_bytes(columns, block, has_softcap) + (has_stash ? stash_bytes(columns) + round_up(blocks * 8, 64) : 0);
  }

 private:
  static std::int64_t stash_bytes(std::int64_t columns) { return round_up(columns, 64) * 4; }
  static std::int64_t used_block(std::int64_t columns, std::int64_t block) { return std::min(block, round_up(columns, 64)); }
  static std::int64_t operand_bytes(std::int64_t columns, std::int64_t block, bool has_softcap) {
    return operand_floats(has_softcap, used_block(columns, block)) * 4;
  }
};

// Rows [0, rows) in blocks, each to the thread that is free. make(slot) gives a thread its worker, which gets row(i) for each
// of its rows and drain() after the last one.
template <class Make>
void walk_row_blocks(const tileloss_executor* executor, int threads, std::int64_t rows, std::int64_t row_block,
                     const Make& make) {
  struct Shared {
    const Make* make;
    std::int64_t rows, row_block;
    std::atomic<std::int64_t> next{0};
  } shared{&make, rows, row_block};
  const tileloss_task work = [](void* data, std::int64_t slot) {
    auto& s = *static_cast<Shared*>(data);
    const FloatingPointScope scope;
    auto worker = (*s.make)(slot);
    const std::int64_t blocks = (s.rows + s.row_block - 1) / s.row_block;
    for (std::int64_t b = s.next.fetch_add(1); b < blocks; b = s.next.fetch_add(1)) {
      const std::int64_t end = std::min(s.rows, (b + 1) * s.row_block);
      for (std::int64_t i = b * s.row_block; i < end; ++i) worker.row(i);
    }
    worker.drain();
  };
  parallel_for(executor, threads, work, &shared);
}

}  // namespace tileloss::impl::cpu
