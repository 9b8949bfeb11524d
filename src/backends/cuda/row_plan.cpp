#include "backends/cuda/row_plan.h"

#include <algorithm>
#include <string>

#include "backends/cuda/kernel_names.h"
#include "backends/cuda/limits.h"
#include "backends/cuda/runtime.h"

namespace tileloss::impl::cuda {
namespace {

constexpr std::int64_t kGroupBytes = 16;
constexpr std::int64_t kFewRowThreads = 128;  // of a block where many of them share a multiprocessor

std::string other_kernels() { return std::string(kAuto) + " or " + kTwoReads + ", as "; }

// What a device has.
struct Shared {
  int of_block = 0, of_multiprocessor = 0, reserved = 0;  // bytes; reserved: in each block
  int most_blocks = 1;                                    // of a cluster

  explicit Shared(std::int32_t device) {
    int major = 0;
    cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (major >= 9) most_blocks = kMaxCluster;
  }
  // Blocks that a multiprocessor holds at once.
  std::int64_t room_for(std::int64_t slice) const {
    const std::int64_t bytes = slice + kSharedOfWholeRow;
    return bytes > of_block ? 0 : of_multiprocessor / (bytes + reserved);
  }
};

// Forward, row stage and backward of a row wait for no other row.
bool is_row_alone(const Problem& p) {
  return p.pass == TILELOSS_VALUE_AND_GRAD && p.needs_forward && p.needs_backward && !p.couples_rows && !p.is_shard &&
         !p.loss->is_linear && p.loss->target() == TargetKind::kLabels;
}

}  // namespace

std::int16_t threads_of_row(std::int64_t columns, tileloss_dtype storage) {
  const std::int64_t of_a_warp = kWarp * 4 * kGroupBytes / element_bytes(storage), most = kMaxRowThreads / kWarp;
  return static_cast<std::int16_t>(kWarp * std::clamp<std::int64_t>((columns + of_a_warp - 1) / of_a_warp, 1, most));
}

std::int64_t slice_bytes(std::int64_t columns, tileloss_dtype storage, std::int32_t blocks) {
  const std::int64_t groups = (columns * element_bytes(storage) + kGroupBytes - 1) / kGroupBytes;
  return (groups + blocks - 1) / blocks * kGroupBytes;
}

Status cut_rows(const Problem& p, tileloss_cuda_kernel hint, RowCut* cut) {
  if (hint < TILELOSS_CUDA_KERNEL_AUTO || hint > TILELOSS_CUDA_KERNEL_CLUSTER)
    return expected("kernel", std::string(kAuto) + ", " + kTwoReads + " or " + kCluster + " (0 to 2)", std::to_string(hint));
  const Shared shared(p.device_index);
  *cut = {threads_of_row(p.columns, p.storage), 1, TILELOSS_CUDA_KERNEL_TWO_READS};
  // The fewest blocks with which the most rows are on their way at once.
  double most = 0;
  for (std::int16_t blocks = 1; blocks <= shared.most_blocks; blocks *= 2) {
    const std::int64_t slice = slice_bytes(p.columns, p.storage, blocks), room = shared.room_for(slice);
    const std::int64_t threads = threads_of_row(slice / element_bytes(p.storage), p.storage);
    const std::int64_t at_once = std::min(room, kRowThreadsAtOnce / std::min<std::int64_t>(threads, kFewRowThreads));
    const double rows = static_cast<double>(at_once) / blocks;
    if (rows <= most) continue;
    most = rows;
    const std::int64_t of_block = kRowThreadsAtOnce / at_once / kWarp * kWarp;
    *cut = {static_cast<std::int16_t>(std::min(threads, of_block)), blocks, TILELOSS_CUDA_KERNEL_TWO_READS};
  }
  const bool may_hold = is_row_alone(p) && most > 0 && hint == TILELOSS_CUDA_KERNEL_AUTO;
  if (may_hold || (p.pass == TILELOSS_VALUE_AND_GRAD && hint == TILELOSS_CUDA_KERNEL_CLUSTER))
    cut->kernel = TILELOSS_CUDA_KERNEL_CLUSTER;
  if (Status s = check_cut(p, *cut); !s.ok()) return s;
  if (cut->kernel != TILELOSS_CUDA_KERNEL_CLUSTER || cut->blocks == 1 || can_place(p, *cut)) return {};
  if (hint == TILELOSS_CUDA_KERNEL_CLUSTER)
    return expected("kernel", other_kernels() + "the device cannot place a cluster of " + std::to_string(cut->blocks) + " blocks",
                    kCluster);
  cut->kernel = TILELOSS_CUDA_KERNEL_TWO_READS;
  return {};
}

Status check_cut(const RowCut& cut) {
  if (cut.threads < kWarp || cut.threads > kMaxRowThreads || cut.threads % kWarp != 0)
    return expected("plan.cuda.threads", "a multiple of 32 up to 384", std::to_string(cut.threads));
  if (cut.blocks < 1 || cut.blocks > kMaxCluster || (cut.blocks & (cut.blocks - 1)) != 0)
    return expected("plan.cuda.blocks", "1, 2, 4 or 8", std::to_string(cut.blocks));
  if (cut.kernel != TILELOSS_CUDA_KERNEL_TWO_READS && cut.kernel != TILELOSS_CUDA_KERNEL_CLUSTER)
    return expected("plan.cuda.kernel", std::string(kTwoReads) + " or " + kCluster + " (1 or 2)", std::to_string(cut.kernel));
  return {};
}

Status check_cut(const Problem& p, const RowCut& cut) {
  if (cut.kernel != TILELOSS_CUDA_KERNEL_CLUSTER) return {};
  if (!is_row_alone(p)) return expected("kernel", other_kernels() + "rows of this call wait for others", kCluster);
  const Shared shared(p.device_index);
  if (cut.blocks <= shared.most_blocks && shared.room_for(slice_bytes(p.columns, p.storage, cut.blocks)) > 0) return {};
  const std::string blocks = std::to_string(shared.most_blocks) + " blocks";
  return expected("kernel", other_kernels() + "a row does not fit in the shared memory of " + blocks, kCluster);
}

}  // namespace tileloss::impl::cuda
