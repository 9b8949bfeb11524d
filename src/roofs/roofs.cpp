#include "roofs/roofs.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "backends/cpu/isa/isa.h"
#include "support/format.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

// A thread takes this much at a time: large enough that the hand-out costs nothing, small enough that the threads end together.
constexpr int64_t kChunkBytes = int64_t{1} << 20;
constexpr int64_t kExpFloats = 2048;  // 8 KiB, a quarter of L1
constexpr int64_t kDistances[] = {1024, 4096, 8192};

RoofLoops widest_loops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return roof_loops_avx512();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return roof_loops_avx2();
  return roof_loops_baseline();
#else
  return roof_loops_neon();
#endif
}

}  // namespace

double median(std::vector<double> values) {
  const size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(middle), values.end());
  if (values.size() % 2 == 1) return values[middle];
  return (values[middle] + *std::max_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(middle))) / 2;
}

Roofs faster_of(const Roofs& a, const Roofs& b) {
  return {std::min(a.in_place_ms, b.in_place_ms), std::min(a.copy_ms, b.copy_ms), std::min(a.read_ms, b.read_ms),
          std::min(a.exp_ms, b.exp_ms), std::max(a.tflops, b.tflops)};
}

double largest_difference(const Roofs& a, const Roofs& b) {
  const auto difference = [](double x, double y) { return x == y ? 0.0 : std::abs(x - y) / std::min(x, y); };
  return std::max({difference(a.in_place_ms, b.in_place_ms), difference(a.copy_ms, b.copy_ms), difference(a.read_ms, b.read_ms),
                   difference(a.exp_ms, b.exp_ms), difference(a.tflops, b.tflops)});
}

RoofMeter::RoofMeter(int threads) : team_(threads), loops_(widest_loops()) {}

double RoofMeter::time_pass(RoofPass pass, char* from, char* to, int64_t bytes, int64_t distance) {
  const int64_t chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
  std::atomic<uint64_t> sink = 0;
  const Timer timer;
  team_.for_each(chunks, [&](int64_t chunk, int) {
    const int64_t begin = chunk * kChunkBytes;
    const int64_t size = std::min(kChunkBytes, bytes - begin) / kRoofGranule * kRoofGranule;
    sink += pass(from + begin, to + begin, size, distance);
  });
  const double ms = timer.milliseconds();
  sink_ += sink;
  return ms;
}

double RoofMeter::best_pass(RoofPass RoofVariant::*pass, Choice& choice, char* from, char* to, int64_t bytes, int repetitions) {
  if (!choice.known) {
    double best = std::numeric_limits<double>::infinity();
    for (int v = 0; v < loops_.num_variants; ++v) {
      const RoofVariant& variant = loops_.variants[v];
      for (const int64_t distance : kDistances) {
        if (!variant.prefetches && distance != kDistances[0]) continue;
        for (int i = 0; i < 3; ++i) {
          const double ms = time_pass(variant.*pass, from, to, bytes, distance);
          if (ms < best) {
            best = ms;
            choice = {v, variant.prefetches ? distance : 0, true};
          }
        }
      }
    }
  }
  std::vector<double> times;
  for (int i = 0; i < repetitions; ++i)
    times.push_back(time_pass(loops_.variants[choice.variant].*pass, from, to, bytes, choice.distance));
  return median(times);
}

double RoofMeter::best_exp(int64_t elements, int repetitions) {
  const int64_t repeats = std::max<int64_t>(1, elements / kExpFloats / team_.size());
  const auto sum = impl::cpu::kernels(impl::cpu::best_isa()).exp_sum;
  std::vector<double> times;
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    std::atomic<uint64_t> sink = 0;
    const Timer timer;
    team_.run([&](int thread) {
      alignas(64) float x[kExpFloats];
      for (int64_t i = 0; i < kExpFloats; ++i) x[i] = -static_cast<float>((i * 37 + thread) % 1000) * 0.01F;
      sink += static_cast<uint64_t>(sum(x, kExpFloats, repeats));
    });
    const double ms = timer.milliseconds();
    sink_ += sink;
    times.push_back(ms * static_cast<double>(elements) / static_cast<double>(repeats * kExpFloats * team_.size()));
  }
  return median(times);
}

Roofs RoofMeter::measure(char* from, char* to, int64_t bytes, int64_t elements, int repetitions) {
  Roofs roofs;
  roofs.read_ms = best_pass(&RoofVariant::read, read_, from, to, bytes, repetitions);
  roofs.in_place_ms = best_pass(&RoofVariant::in_place, in_place_, from, to, bytes, repetitions);
  if (to != nullptr) {
    roofs.copy_ms = best_pass(&RoofVariant::copy, copy_, from, to, bytes, repetitions);
  } else {
    const int64_t half = bytes / 2 / kRoofGranule * kRoofGranule;
    const double scale = static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(half, 1));
    roofs.copy_ms = scale * best_pass(&RoofVariant::copy, copy_, from, from + half, half, repetitions);
  }
  roofs.exp_ms = best_exp(elements, repetitions);
  return roofs;
}

std::string RoofMeter::description() const {
  const auto pass = [&](const Choice& choice) {
    const char* name = loops_.variants[choice.variant].name;
    return choice.distance > 0 ? formatted("{} {}", name, choice.distance) : std::string(name);
  };
  return formatted("{}; in place: {}; copy: {}; read: {}", loops_.isa, pass(in_place_), pass(copy_), pass(read_));
}

}  // namespace tileloss::tools
