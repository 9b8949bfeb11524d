#include "tests/cuda_on_host/threads.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "tests/cuda_on_host/copies.h"
#include "tests/cuda_on_host/device_code.h"
#include "tests/cuda_on_host/sanitizers.h"
#include "tests/cuda_on_host/shared_memory.h"

#if !defined(__x86_64__)
#error "fibers are written for x86-64"
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Puts what a call must keep on the stack, the stack's end into *from, and goes on where `to` left off.
extern "C" void cuda_on_host_change_stack(void** from, void* to);
asm(".text\n"
    ".type cuda_on_host_change_stack,@function\n"
    "cuda_on_host_change_stack:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp,(%rdi)\n  movq %rsi,%rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size cuda_on_host_change_stack,.-cuda_on_host_change_stack\n");

namespace cuda_on_host {
namespace {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStackBytes = kHasAddressSanitizer ? 256 << 10 : 64 << 10;

enum class Wait { kNone, kBlock, kCluster, kLanes, kGone };
constexpr const char* kWaits[] = {"runs", "__syncthreads", "cluster_sync", "a warp's call", "has left"};

struct Thread {
  std::byte* stack = nullptr;
  void* top = nullptr;  // where it goes on; null before it began
  uint3 index{};
  unsigned number = 0, block = 0;  // in the cluster, of the cluster
  Wait wait = Wait::kNone;
  bool has_begun = false;  // the kernel: begin_kernel()
  Place at;
  // Of a warp's call: what this lane gives, whose it takes, what it got.
  std::uint64_t value = 0, result = 0;
  unsigned source = 0, mask = 0;
  Copies copies;
  void *fake_stack = nullptr, *fiber = nullptr;  // the sanitizers'
};

struct Barrier {
  unsigned arrived = 0, first = 0;
};

struct Group {  // lanes of a warp at one call
  unsigned mask, arrived, first;
};
struct Warp {
  Group groups[kWarp];
  unsigned count = 0;
};

// Who can run, and whose turn it is. The youngest's first: a warp runs far ahead of the others. The eldest's first: in step.
// Any's.
enum class Turns { kYoungest, kEldest, kAny };

class Machine {
 public:
  void run(const Kernel& kernel, Random& random);

  void begin_kernel() { running_->has_begun = true; }
  bool has_begun() const { return running_->has_begun; }
  void sync_block(Place at) {
    const unsigned first = running_->block * threads_;
    arrive(block_barriers_[running_->block], first, threads_, Wait::kBlock, at);
  }
  void sync_cluster(Place at) {
    arrive(cluster_barrier_, 0, total_, Wait::kCluster, at);
    have_met_ = true;
  }
  void sync_cluster_if(bool is_at_wait, Place at) {
    if (is_at_wait == meets_at_wait_) sync_cluster(at);
  }
  void exchange(unsigned mask, std::uint64_t value, unsigned source, Place at);
  std::uint64_t result_of_lane() const { return running_->result; }
  unsigned lane() const { return running_->number % threads_ % kWarp; }
  Warp& warp() { return warps_[running_->block * warps_of_block_ + running_->number % threads_ / kWarp]; }
  unsigned first_of_warp() const { return running_->number - lane(); }

  void begin_copy(void* to, const void* from, std::size_t bytes, Place at);
  void end_copy_group() { running_->copies.end_group(); }
  void wait_for_copies(unsigned others) { running_->copies.wait(others, *random_); }

  unsigned rank() const { return running_->block; }
  unsigned cluster() const { return kernel_->cluster; }
  void* shared(const void* key, std::size_t bytes, std::size_t alignment);
  void* dynamic() {
    static constexpr char key = 0;
    return kernel_->dynamic_bytes == 0 ? nullptr : shared(&key, kernel_->dynamic_bytes, 16);
  }
  void* peer(const void* mine, unsigned rank);
  [[noreturn]] void stop(const char* what, const Thread* a = nullptr, const Thread* b = nullptr) const;

 private:
  void prepare(const Kernel& kernel);
  void run_cluster(uint3 block);
  void change_fibers();
  void begin(Thread& thread);
  static void enter();
  void live();

  void arrive(Barrier& barrier, unsigned first, unsigned count, Wait wait, Place at);
  void wake(unsigned thread) {
    threads_of_[thread].wait = Wait::kNone;
    ready_[tail_++ & ready_mask_] = thread;
  }
  void shuffle_since(unsigned from) {
    for (unsigned count = tail_ - from; count > 1; --count) {
      std::swap(ready_[(from + count - 1) & ready_mask_], ready_[(from + random_->below(count)) & ready_mask_]);
    }
  }
  Thread* next();
  void give_way();
  void change_to(Thread* to, bool is_leaving);
  void arrived_on_stack();
  [[noreturn]] void deadlock() const;

  const Kernel* kernel_ = nullptr;
  Random* random_ = nullptr;
  unsigned threads_ = 0, total_ = 0, warps_of_block_ = 0;
  uint3 block_{};  // the cluster's first
  std::vector<Thread> threads_of_;
  std::vector<Warp> warps_;
  std::vector<Barrier> block_barriers_;
  Barrier cluster_barrier_;
  bool meets_at_wait_ = false;  // where the cluster's barriers have two parts
  bool have_met_ = false;       // all of the cluster, at a barrier: so all of its blocks have begun
  std::vector<unsigned> left_;  // of each block
  std::vector<unsigned> ready_;
  unsigned head_ = 0, tail_ = 0, ready_mask_ = 0;
  Turns turns_ = Turns::kAny;
  Thread* running_ = nullptr;
  SharedMemory shared_;

  void *host_top_ = nullptr, *host_fake_stack_ = nullptr, *host_fiber_ = nullptr;
  const void* host_stack_ = nullptr;
  std::size_t host_stack_bytes_ = 0;
  bool comes_from_host_ = false;
  char begun_ = 0, ended_ = 0;  // addresses that stand for the kernel's begin and end (acquire, release)
};

Machine machine;

bool same(const Place& a, const Place& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

void Machine::stop(const char* what, const Thread* a, const Thread* b) const {
  std::fprintf(stderr, "cuda_on_host: %s, in the cluster of block (%u, %u, %u)\n", what, block_.x, block_.y, block_.z);
  for (const Thread* thread : {a, b}) {
    if (thread == nullptr) continue;
    std::fprintf(stderr, "  thread (%u, %u, %u) of its block %u: %s", thread->index.x, thread->index.y, thread->index.z,
                 thread->block, kWaits[static_cast<int>(thread->wait)]);
    if (thread->wait != Wait::kNone && thread->wait != Wait::kGone) {
      std::fprintf(stderr, " at %s:%u, mask %08x", thread->at.file_name(), thread->at.line(), thread->mask);
    }
    std::fprintf(stderr, "\n");
  }
  std::abort();
}

void Machine::deadlock() const {
  const Thread *waits = nullptr, *other = nullptr;
  for (unsigned i = 0; i < total_; ++i) {
    const Thread& thread = threads_of_[i];
    if (thread.wait != Wait::kGone && waits == nullptr) waits = &thread;
  }
  for (unsigned i = 0; i < total_; ++i) {
    const Thread& thread = threads_of_[i];
    if (thread.wait != waits->wait || !same(thread.at, waits->at)) other = &thread;
  }
  stop("divergent barrier: deadlock, as not all threads come to it", waits, other);
}

void Machine::prepare(const Kernel& kernel) {
  kernel_ = &kernel;
  threads_ = kernel.block.x * kernel.block.y * kernel.block.z;
  total_ = threads_ * kernel.cluster;
  warps_of_block_ = (threads_ + kWarp - 1) / kWarp;
  if (threads_of_.size() < total_) {
    const std::size_t had = threads_of_.size(), more = total_ - had;
    void* const all =
        mmap(nullptr, kStackBytes * more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    threads_of_.resize(total_);
    for (std::size_t i = 0; i < more; ++i) {
      Thread& thread = threads_of_[had + i];
      thread.stack = static_cast<std::byte*>(all) + kStackBytes * i;
      mprotect(thread.stack, static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
      if (has_thread_sanitizer()) thread.fiber = __tsan_create_fiber(0);
    }
    unsigned size = 1;
    while (size < total_) size *= 2;
    ready_.assign(size, 0);
    ready_mask_ = size - 1;
  }
  warps_.resize(std::size_t{warps_of_block_} * kernel.cluster);
  block_barriers_.resize(kernel.cluster);
  left_.resize(kernel.cluster);
  for (unsigned i = 0; i < total_; ++i) {
    Thread& thread = threads_of_[i];
    const unsigned in_block = i % threads_;
    thread.number = i, thread.block = i / threads_;
    thread.index = {in_block % kernel.block.x, in_block / kernel.block.x % kernel.block.y,
                    in_block / (kernel.block.x * kernel.block.y)};
  }
  blockDim = kernel.block, gridDim = kernel.grid;
}

thread_local bool runs_kernel = false;

void Machine::run(const Kernel& kernel, Random& random) {
  random_ = &random;
  prepare(kernel);
  if (has_thread_sanitizer()) host_fiber_ = __tsan_get_current_fiber();
  release(&begun_);
  const unsigned across = kernel.grid.x / kernel.cluster;
  std::vector<unsigned> order(std::size_t{across} * kernel.grid.y * kernel.grid.z);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  random.shuffle(order.data(), static_cast<unsigned>(order.size()));
  runs_kernel = true;
  for (const unsigned i : order) {
    run_cluster({i % across * kernel.cluster, i / across % kernel.grid.y, i / across / kernel.grid.y});
  }
  runs_kernel = false;
}

void Machine::run_cluster(uint3 block) {
  block_ = block;
  turns_ = static_cast<Turns>(random_->below(3));
  head_ = tail_ = 0;
  have_met_ = false;
  meets_at_wait_ = random_->below(2) == 0;
  for (unsigned i = 0; i < total_; ++i) {
    threads_of_[i].top = nullptr;
    threads_of_[i].has_begun = false;
    threads_of_[i].copies = {};
    wake(i);
  }
  random_->shuffle(ready_.data(), total_);
  if (has_thread_sanitizer()) change_fibers();
  for (unsigned& count : left_) count = 0;
  change_to(next(), false);
  for (const unsigned count : left_) {
    if (count != threads_) deadlock();
  }
  acquire(&ended_);
  shared_.clear();
}

// Thread sanitizer knows threads by their fibers: those of two blocks that come after each other must not be the same, or it
// would see no race between the blocks.
void Machine::change_fibers() {
  for (unsigned count = total_; count > 1; --count) {
    Thread &a = threads_of_[count - 1], &b = threads_of_[random_->below(count)];
    std::swap(a.fiber, b.fiber);
    std::swap(a.stack, b.stack);
  }
}

Thread* Machine::next() {
  if (head_ == tail_) return nullptr;
  if (turns_ == Turns::kEldest) return &threads_of_[ready_[head_++ & ready_mask_]];
  if (turns_ == Turns::kAny) {
    std::swap(ready_[(head_ + random_->below(tail_ - head_)) & ready_mask_], ready_[(tail_ - 1) & ready_mask_]);
  }
  return &threads_of_[ready_[--tail_ & ready_mask_]];
}

// A fresh stack of a thread: change_stack's six registers, then where it returns to. Each begins at lines of its own, or the
// stacks of a block would meet in the same few sets of the cache.
void Machine::begin(Thread& thread) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(thread.stack, kStackBytes);
#endif
  auto** top = reinterpret_cast<void**>(thread.stack + kStackBytes - thread.number % 32 * 128);
  *--top = nullptr, *--top = nullptr;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Machine::enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread.top = top;
}

// To a thread, or to the host where there is none.
void Machine::change_to(Thread* to, bool is_leaving) {
  Thread* const from = running_;
  comes_from_host_ = from == nullptr;
  running_ = to;
  if (to != nullptr) {
    if (to->top == nullptr) begin(*to);
    threadIdx = to->index;
    blockIdx = {block_.x + to->block, block_.y, block_.z};
  }
  void** const from_top = from == nullptr ? &host_top_ : &from->top;
#if defined(__SANITIZE_ADDRESS__)
  void** const from_fake = is_leaving ? nullptr : from == nullptr ? &host_fake_stack_ : &from->fake_stack;
  __sanitizer_start_switch_fiber(from_fake, to == nullptr ? host_stack_ : to->stack,
                                 to == nullptr ? host_stack_bytes_ : kStackBytes);
#else
  static_cast<void>(is_leaving);
#endif
  if (has_thread_sanitizer()) __tsan_switch_to_fiber(to == nullptr ? host_fiber_ : to->fiber, 1);
  cuda_on_host_change_stack(from_top, to == nullptr ? host_top_ : to->top);
  arrived_on_stack();
}

void Machine::arrived_on_stack() {
#if defined(__SANITIZE_ADDRESS__)
  void* const fake = running_ == nullptr ? host_fake_stack_ : running_->fake_stack;
  const void* from = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake, &from, &bytes);
  if (comes_from_host_) host_stack_ = from, host_stack_bytes_ = bytes;
#endif
}

void Machine::enter() {
  machine.running_->fake_stack = nullptr;
  machine.arrived_on_stack();
  machine.live();
  __builtin_trap();
}

void Machine::live() {
  for (;;) {
    acquire(&begun_);
    kernel_->body();
    release(&ended_);
    Thread& me = *running_;
    if (!me.has_begun) stop("a kernel that has not called begin_kernel()", &me);
    me.wait = Wait::kGone;
    if (++left_[me.block] == threads_ && kernel_->cluster > 1) {
      acquire(&ended_);
      shared_.close(me.block);
    }
    Thread* const to = next();
    // Who has not begun takes this stack; thread sanitizer knows threads by their stacks.
    if (to == nullptr || to->top != nullptr || has_thread_sanitizer()) return change_to(to, true);
    std::swap(to->stack, me.stack);
    to->top = me.stack;  // not null: it has begun
    running_ = to;
    threadIdx = to->index;
    blockIdx = {block_.x + to->block, block_.y, block_.z};
  }
}

void Machine::give_way() {
  Thread* const to = next();
  if (to != running_) change_to(to, false);
}

void Machine::arrive(Barrier& barrier, unsigned first, unsigned count, Wait wait, Place at) {
  Thread& me = *running_;
  me.wait = wait, me.at = at, me.mask = 0;
  if (barrier.arrived == 0) barrier.first = me.number;
  const Thread& eldest = threads_of_[barrier.first];
  if (!same(eldest.at, at)) stop("divergent barrier", &eldest, &me);
  release(&barrier);
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    const unsigned from = tail_;
    for (unsigned i = first; i < first + count; ++i) wake(i);
    shuffle_since(from);
  }
  give_way();
  acquire(&barrier);
}

void Machine::exchange(unsigned mask, std::uint64_t value, unsigned source, Place at) {
  Thread& me = *running_;
  me.wait = Wait::kLanes, me.at = at, me.mask = mask, me.value = value, me.source = source;
  const unsigned bit = 1u << lane();
  if ((mask & bit) == 0) stop("a lane that its mask does not name", &me);
  Warp& warp = this->warp();
  Group* group = warp.groups;
  while (group != warp.groups + warp.count && group->mask != mask) ++group;
  if (group == warp.groups + warp.count) warp.groups[warp.count++] = {mask, 0, me.number};
  const Thread& eldest = threads_of_[group->first];
  if (!same(eldest.at, at)) stop("divergent barrier", &eldest, &me);
  if ((group->arrived |= bit) == mask) {
    *group = warp.groups[--warp.count];
    Thread* const lanes = &threads_of_[first_of_warp()];
    const unsigned from = tail_;
    for (unsigned left = mask; left != 0; left &= left - 1) {
      Thread& thread = lanes[__builtin_ctz(left)];
      // What a lane outside the mask has is not defined.
      thread.result = (mask >> thread.source & 1) != 0 ? lanes[thread.source].value : ~std::uint64_t{0};
      wake(thread.number);
    }
    shuffle_since(from);
  }
  give_way();
}

void Machine::begin_copy(void* to, const void* from, std::size_t bytes, Place at) {
  running_->at = at;
  for (const void* place : {static_cast<const void*>(to), from}) {
    if (reinterpret_cast<std::uintptr_t>(place) % bytes != 0) stop("a copy that is not aligned", running_);
  }
  if (!shared_.has(running_->block, to, bytes)) stop("a copy to what is no shared memory of the block", running_);
  running_->copies.begin({to, from, bytes}, *random_);
}

void* Machine::shared(const void* key, std::size_t bytes, std::size_t alignment) {
  void* const data = shared_.find(running_->block, key, bytes, alignment);
  if (shared_.bytes(running_->block) > kernel_->most_shared_bytes) stop("more shared memory than a block can have", running_);
  return data;
}

void* Machine::peer(const void* mine, unsigned rank) {
  if (rank >= kernel_->cluster) stop("a peer that the cluster lacks", running_);
  if (left_[rank] == threads_) stop("the shared memory of a block that has left", running_);
  if (rank != running_->block && !have_met_) stop("the shared memory of a block that may not have begun", running_);
  void* const at = shared_.peer(running_->block, mine, rank);
  if (at == nullptr) stop("a peer of what is no shared memory of the block", running_);
  return at;
}

}  // namespace

void run(const Kernel& kernel, Random& random) { machine.run(kernel, random); }
bool is_in_kernel() { return runs_kernel; }
bool has_begun() { return machine.has_begun(); }
void begin_kernel() { machine.begin_kernel(); }

void* shared_memory(const void* key, std::size_t bytes, std::size_t alignment) { return machine.shared(key, bytes, alignment); }
void* dynamic_shared_memory() { return machine.dynamic(); }
void* peer_of(const void* mine, unsigned rank) { return machine.peer(mine, rank); }
void begin_copy(void* to, const void* from, std::size_t bytes, Place at) { machine.begin_copy(to, from, bytes, at); }
void end_copy_group() { machine.end_copy_group(); }
void wait_for_copies(unsigned others) { machine.wait_for_copies(others); }
void sync_block(Place at) { machine.sync_block(at); }
void sync_cluster(Place at) { machine.sync_cluster(at); }
void arrive_at_cluster(Place at) { machine.sync_cluster_if(false, at); }
void wait_for_cluster(Place at) { machine.sync_cluster_if(true, at); }
std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned source_lane, Place at) {
  machine.exchange(mask, value, source_lane, at);
  return machine.result_of_lane();
}
unsigned lane() { return machine.lane(); }
unsigned cluster_rank() { return machine.rank(); }
unsigned cluster_size() { return machine.cluster(); }

}  // namespace cuda_on_host
