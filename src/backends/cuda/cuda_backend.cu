#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/cuda_device.h"
#include "backends/cuda/kernel_names.h"
#include "backends/cuda/library.h"
#include "backends/cuda/scale_gradient.h"
#include "losses/row_arrays.h"
#include "schema/options.h"

namespace tileloss::impl::cuda {
namespace {

struct CudaPlan {
  RowCut rows;
  HeadCut head;
};
static_assert(sizeof(CudaPlan) <= sizeof(tileloss_plan::other));

Status bad_temperature(const std::string& name, double value) {
  const std::string side = name.starts_with("teacher") ? "teacher_" : "";
  return expected(
      name, side + "logit_scale / " + name + " and " + side + "softcap / " + name + " from 1.18e-38 to 8.5e+37, for float32",
      std::to_string(value));
}

// But for the head's.
std::int64_t rows_bytes(const Problem& p) {
  std::int64_t bytes = 0;
  visit_loss(p.loss->info.name, [&]<class Loss>() { bytes = CudaDevice::workspace_bytes<Loss>(p); });
  return bytes;
}
std::int64_t workspace_bytes(const Problem& p, const HeadCut& cut) {
  Pieces head;
  const HeadPieces pieces(p, cut, head);
  return rows_bytes(p) + head.bytes();
}

// A merge of row states, a row each.
struct SetIdentity {
  tileloss_row_state state;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const { empty_row(state, i); }
};
struct MergeRows {
  tileloss_row_state into, from;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const { merge_row(into, from, i); }
};

class CudaBackend final : public Backend {
 public:
  tileloss_device_type device_type() const override { return TILELOSS_CUDA; }
  const char* name() const override { return "cuda"; }
  std::int32_t device_count() const override {
    static const int found = [] {
      int count = 0;
      return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
    }();
    return found;
  }

  Status plan(const Problem& problem, const tileloss_plan_options& hints, const tileloss_executor* executor,
              tileloss_plan* plan) const override;
  Status check_plan(const tileloss_plan& plan) const override {
    const auto [rows, head] = own_part(plan);
    if (Status s = check_cut(rows); !s.ok()) return s;
    if (head.vocab_block == 0 || head.is_valid()) return {};
    if (head.kept_bytes != 2 && head.kept_bytes != 4)
      return expected("plan.cuda.kept_bytes", "2 or 4", std::to_string(head.kept_bytes));
    return expected(
        "plan.cuda", "a row_block, a vocab_block of 64s up to 8192 and a chunk_columns of 64s that divides it",
        std::to_string(head.row_block) + ", " + std::to_string(head.vocab_block) + " and " + std::to_string(head.chunk_columns));
  }
  Status begin(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run,
               std::unique_ptr<Call>* call) const override;
  Status set_identity(const tileloss_row_state& state) const override {
    return on_stream(state, nullptr, [&](Queue& queue) { launch_each(queue, state.rows, SetIdentity{state}); });
  }
  Status merge(tileloss_row_state* into, const tileloss_row_state& from) const override;
  Status scale_gradient(const tileloss_matrix& gradient, const float* factor, const tileloss_run& run) const override {
    return on_stream(gradient, run.stream, [&](Queue& queue) { launch_scale(queue, gradient, factor); });
  }
  Status check_errors(std::int32_t device_index, void* stream) const override;
  DeviceMemory* memory() const override { return &memory_; }
  std::string out_of_reach(const void* data, std::int32_t device_index) const override;
  std::vector<PlanFact> describe(const tileloss_plan& plan) const override {
    const auto [rows, head] = own_part(plan);
    std::vector<PlanFact> facts = {{"threads", std::int64_t{rows.threads}}};
    if (head.vocab_block == 0) {
      facts.push_back({"blocks", std::int64_t{rows.blocks}});
      facts.push_back({"kernel", std::string(rows.kernel == TILELOSS_CUDA_KERNEL_CLUSTER ? kCluster : kTwoReads)});
      return facts;
    }
    const tileloss_schedule schedule = head.kept_columns + head.kept_rows > 0 ? TILELOSS_SCHEDULE_STASH
                                       : plan.pass == TILELOSS_VALUE_AND_GRAD ? TILELOSS_SCHEDULE_RECOMPUTE
                                                                              : TILELOSS_SCHEDULE_SWEEPS;
    facts.push_back({"schedule", std::string(tileloss_schedule_name(schedule))});
    for (const auto& [name, value] : {std::pair{"row_block", head.row_block},
                                      {"vocab_block", head.vocab_block},
                                      {"chunk_columns", head.chunk_columns},
                                      {"kept_columns", head.kept_columns},
                                      {"kept_rows", head.kept_rows},
                                      {"kept_bytes", head.kept_bytes}})
      facts.push_back({name, value});
    return facts;
  }

 private:
  static CudaPlan own_part(const tileloss_plan& plan) {
    CudaPlan own;
    std::memcpy(&own, plan.other, sizeof own);
    return own;
  }
  // `on`: a view, or a row state. Null: its device's default stream.
  template <class On, class Use>
  static Status on_stream(const On& on, void* stream, Use&& use) {
    const DeviceGuard guard(on.device_index);
    Queue queue(static_cast<cudaStream_t>(stream));
    queue.keep(guard.status());
    use(queue);
    return queue.status();
  }
  // The device's, in memory that both see; made by the first who asks.
  Status report(std::int32_t device_index, Report** found) const;

  mutable CudaMemory memory_;
  mutable std::mutex mutex_;
  mutable std::map<std::int32_t, Report*> reports_;
  mutable Algorithms algorithms_;
};

Status CudaBackend::plan(const Problem& p, const tileloss_plan_options& hints, const tileloss_executor* /*executor*/,
                         tileloss_plan* plan) const {
  const DeviceGuard guard(p.device_index);
  if (Status s = guard.status(); !s.ok()) return s;
  Report* made = nullptr;
  if (Status s = report(p.device_index, &made); !s.ok()) return s;
  CudaPlan own = {{0, 1, TILELOSS_CUDA_KERNEL_TWO_READS}, {}};
  if (!has_head(p)) {
    if (Status s = cut_rows(p, hints.cuda.kernel, &own.rows); !s.ok()) return s;
  } else {
    const auto bytes = [&](const HeadCut& cut) { return workspace_bytes(p, cut); };
    int l2_bytes = 0;
    if (Status s = status_of(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, p.device_index), "the L2 cache"); !s.ok())
      return s;
    if (Status s = cut_head(p, hints, l2_bytes, bytes, &own.head); !s.ok()) return s;
    // Whole rows are read as they are from logits, for the same bits.
    own.rows.threads = threads_of_row(own.head.vocab_block, p.storage);
    if (p.loss->needs_target_sweep()) {
      if (Status s = cut_rows(p, TILELOSS_CUDA_KERNEL_AUTO, &own.rows); !s.ok()) return s;
    }
    HeadAlgorithms chosen;
    if (Status s = HeadAlgorithms::find(p, own.head, algorithms_, &chosen); !s.ok()) return s;
  }
  std::memcpy(plan->other, &own, sizeof own);
  const auto add = [&](const char* name, std::int64_t bytes) {
    plan->workspace_bytes += bytes;
    if (plan->buffer_count == TILELOSS_MAX_PLAN_BUFFERS) return;
    tileloss_plan_buffer& buffer = plan->buffers[plan->buffer_count++];
    std::strncpy(buffer.name, name, sizeof buffer.name - 1);
    buffer.bytes = bytes;
  };
  add("rows", rows_bytes(p));
  Pieces pieces;
  for (const auto& [name, bytes] : HeadPieces(p, own.head, pieces).buffers) add(name, bytes);
  if (hints.workspace_bytes > 0 && plan->workspace_bytes > hints.workspace_bytes)
    return {TILELOSS_WORKSPACE_TOO_SMALL, "workspace_bytes: expected at least " + std::to_string(plan->workspace_bytes) +
                                              ", got a budget of " + std::to_string(hints.workspace_bytes)};
  return {};
}

Status CudaBackend::begin(const Problem& p, const tileloss_plan& plan, const tileloss_run& run,
                          std::unique_ptr<Call>* call) const {
  const auto [rows, cut] = own_part(plan);
  if (Status s = check_cut(p, rows); !s.ok()) return s;
  if (has_head(p) && !cut.is_valid()) return expected("plan.cuda.vocab_block", "that of an LM head", "none");
  if (cut.has_words() && !can_keep_words(p)) return expected("plan.cuda.kept_bytes", "4 for this call", "2");
  if (const std::int64_t needed = workspace_bytes(p, cut); plan.workspace_bytes < needed)
    return expected("plan.workspace_bytes", "at least the " + std::to_string(needed) + " that the rows and the head need",
                    std::to_string(plan.workspace_bytes));
  if (Status s = check_workspace(run, plan); !s.ok()) return s;
  DeviceGuard guard(p.device_index);  // to the end of the call
  if (Status s = guard.status(); !s.ok()) return s;
  const auto stream = static_cast<cudaStream_t>(run.stream);
  Report* report = nullptr;
  if (Status s = this->report(p.device_index, &report); !s.ok()) return s;
  HeadAlgorithms algorithms;
  if (Status s = HeadAlgorithms::find(p, cut, algorithms_, &algorithms); !s.ok()) return s;
  auto* workspace = static_cast<std::byte*>(run.workspace);
  StreamMemory owned(nullptr, {stream});
  if (workspace == nullptr) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (Status s = status_of(cudaStreamIsCapturing(stream, &capture), "the stream"); !s.ok()) return s;
    if (capture != cudaStreamCaptureStatusNone)
      return expected("workspace", "device memory, while the stream is being captured", "null");
    void* data = nullptr;
    if (Status s = status_of(cudaMallocAsync(&data, static_cast<std::size_t>(plan.workspace_bytes), stream), "the workspace");
        !s.ok())
      return s;
    owned.reset(static_cast<std::byte*>(data));
    workspace = owned.get();
  }
  return device::begin_call(
      CudaDevice(p, rows, cut, algorithms, std::move(guard), workspace, rows_bytes(p), std::move(owned), stream, report), call);
}

Status CudaBackend::merge(tileloss_row_state* into, const tileloss_row_state& from) const {
  return on_stream(*into, nullptr, [&](Queue& queue) { launch_each(queue, into->rows, MergeRows{*into, from}); });
}

// A kernel that reads an address which its device has not ends the process's context with it. What CUDA knows of is refused where
// the primary context has another address for it, or none: another GPU's, another context's. Of what CUDA does not know nothing
// is refused where the GPU goes by the host's page tables, as on a Grace Hopper. Where the driver moves pages that a kernel
// missed (HMM), which depends on the driver and not on the GPU, it is: by mistake such a pointer would be read long after the
// call, a number that lay on its caller's stack say. An error of another kind is an earlier kernel's, and the launch will say so.
std::string CudaBackend::out_of_reach(const void* data, std::int32_t device_index) const {
  const DeviceGuard guard(device_index);
  if (!guard.status().ok()) return {};
  cudaPointerAttributes where = {};  // unregistered, where that is an error
  const cudaError_t error = cudaPointerGetAttributes(&where, data);
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess && error != cudaErrorInvalidValue) return {};
  int is_reachable = where.devicePointer == data;
  if (where.type == cudaMemoryTypeUnregistered)
    cudaDeviceGetAttribute(&is_reachable, cudaDevAttrPageableMemoryAccessUsesHostPageTables, device_index);
  if (is_reachable != 0) return "";
  if (where.type != cudaMemoryTypeDevice) return "a pointer of the host's";
  return (where.device == device_index ? "memory of another context on cuda:" : "memory of cuda:") + std::to_string(where.device);
}

Status CudaBackend::report(std::int32_t device_index, Report** found) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Report*& report = reports_[device_index];
  if (report == nullptr) {
    const DeviceGuard guard(device_index);
    if (Status s = guard.status(); !s.ok()) return s;
    const ApartFromCapture apart;
    void* data = nullptr;
    if (Status s =
            status_of(cudaHostAlloc(&data, sizeof(Report), cudaHostAllocPortable | cudaHostAllocMapped), "its error report");
        !s.ok())
      return s;
    report = new (data) Report();
  }
  *found = report;
  return {};
}

Status CudaBackend::check_errors(std::int32_t device_index, void* /*stream*/) const {
  Report* all = nullptr;
  if (Status s = report(device_index, &all); !s.ok()) return s;
  const std::lock_guard<std::mutex> lock(mutex_);  // a thread reads a report, then another may be written
  const std::atomic_ref<int> state(all->state);
  if (state.load(std::memory_order_acquire) != kWritten) return {};
  const Report r = *all;
  state.store(kUnwritten, std::memory_order_release);
  switch (r.what) {
    case Wrong::kLabel: {
      const std::string slot = r.slot >= 0 ? "," + std::to_string(r.slot) : "";
      return bad_label(std::to_string(r.index) + slot, r.label, r.classes, r.ignore_index);
    }
    case Wrong::kNumber:
      return r.if_missing != nullptr && std::isnan(r.number) ? invalid(r.if_missing) : out_of_range(r.field, r.number);
    case Wrong::kTransform: return bad_temperature(r.temperature, r.number);
    case Wrong::kEntry:
    case Wrong::kEntryTwice: return bad_entry(r.entry, r.classes, r.what == Wrong::kEntryTwice);
    case Wrong::kOffset: return check_offset(r.index, r.count, r.offset, r.before, r.rows);
    case Wrong::kNothing: break;
  }
  return {};
}

}  // namespace

const Backend& cuda_backend() {
  static const auto* const backend = new CudaBackend();  // for good: at the end of the process CUDA may be gone before it
  return *backend;
}

}  // namespace tileloss::impl::cuda

// See library.h.
extern "C" __attribute__((visibility("default"))) const tileloss::impl::Backend* tileloss_cuda_backend(const char* version,
                                                                                                       char* missing,
                                                                                                       std::size_t capacity) {
  const auto say = [&](const std::string& text) {
    std::strncpy(missing, text.c_str(), capacity - 1);
    missing[capacity - 1] = '\0';
    return nullptr;
  };
  if (std::strcmp(version, TILELOSS_VERSION_STRING) != 0)
    return say("expected version " + std::string(version) + ", got " TILELOSS_VERSION_STRING);
  int count = 0, driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
    return say("there is no driver");  // which CUDA calls one that is too old
  if (error != cudaSuccess || count == 0) return say(error != cudaSuccess ? cudaGetErrorString(error) : "there is no GPU");
  return &tileloss::impl::cuda::cuda_backend();
}
