// The two loops over the vocabulary, written once for every instruction set (Simd), storage type (T) and logit transform.
//
// Cost model, bfloat16, per element: forward one exp (about 9 vector operations) and 4 more; backward from the stash 2 and a
// conversion; memory 2 bytes read and 2 written, the stash (4 bytes, written and read) stays in the L2 cache. With the row
// after it in flight while a row is scaled out of the stash, DRAM and arithmetic overlap. Measured figures: docs/performance.md.
//
// Everything here is a template over Simd, so that no symbol is shared between instruction sets.
#ifndef TILELOSS_CPU_SWEEPS_H_
#define TILELOSS_CPU_SWEEPS_H_

#include "cpu/row_kernel.h"
#include "cpu/sweep_limits.h"
#include "cpu/transforms.h"

namespace tileloss::cpu {

// What the loop body does; every combination in use is its own instantiation.
struct Features {
  bool forward = false;
  bool write_stash = false;
  bool entropy = false;
  bool collision = false;
  bool backward = false;
  bool read_stash = false;
  bool general = false;  // backward with prob_logp or class weights
  bool stream = false;
};

template <class Simd, class T>
class Sweeps {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr std::int64_t kPair = Simd::kPair;
  // Bytes ahead in the row that is read from memory. 4 KB: further changes nothing, 1 KB loses a tenth.
  static constexpr std::int64_t kPrefetchBytes = 4096;

  // One block's sums, in four accumulators each so that no addition waits for the one before.
  struct Accumulators {
    F sum[4], max[4], entropy[4], collision[4];
    Accumulators() {
      for (int i = 0; i < 4; ++i) {
        sum[i] = entropy[i] = collision[i] = Simd::set(0);
        max[i] = Simd::set(-kInfinity);
      }
    }
    static float total(const F* v) { return Simd::reduce_add(Simd::add(Simd::add(v[0], v[1]), Simd::add(v[2], v[3]))); }
    float total_max() const { return Simd::reduce_max(Simd::max(Simd::max(max[0], max[1]), Simd::max(max[2], max[3]))); }
  };

  // A block's share of a ForwardRow and a BackwardRow.
  template <class Transform>
  struct Block {
    Transform transform;
    const T* x = nullptr;  // forward
    std::int64_t hole = -1;  // forward: the target's column, which counts for the maximum only
    float* stash = nullptr;
    F reference;
    const T* previous_x = nullptr;
    T* dx = nullptr;
    const float* previous_stash = nullptr;
    const float* class_weights = nullptr;
    F max, log_sum, prob, prob_logp, uniform;

    explicit Block(const LogitTransform& t) : transform(t) {
      reference = max = log_sum = prob = prob_logp = uniform = Simd::set(0);
    }
  };

  template <Features kF>
  static inline void forward_lanes(F x, [[maybe_unused]] F d, F e, [[maybe_unused]] float* stash, Accumulators& acc, int lane) {
    acc.max[lane] = Simd::max(x, acc.max[lane]);
    acc.sum[lane] = Simd::add(acc.sum[lane], e);
    // 0 * -inf must not arise: exp is 0 from -104 on.
    if constexpr (kF.entropy) acc.entropy[lane] = Simd::fma(Simd::max(Simd::set(-200), d), e, acc.entropy[lane]);

    if constexpr (kF.collision) acc.collision[lane] = Simd::fma(e, e, acc.collision[lane]);
    if constexpr (kF.write_stash) Simd::store(stash, e);
  }

  template <Features kF, bool kMasked, class Transform>
  static inline void forward_step(const Block<Transform>& b, std::int64_t i, int n, Accumulators& acc, int lane) {
    if constexpr (!kMasked) Simd::prefetch(reinterpret_cast<const char*>(b.x + i) + kPrefetchBytes);
    const Pair x = kMasked && n < kPair ? Simd::load_pair_partial(b.x + i, n, -kInfinity) : Simd::load_pair(b.x + i);
    const Pair d = {b.transform.minus(x.a, b.reference), b.transform.minus(x.b, b.reference)};
    Pair e = {Simd::exp(d.a), Simd::exp(d.b)};
    if constexpr (kMasked) e = Simd::keep(e, n, static_cast<int>(b.hole - i), b.x);
    forward_lanes<kF>(x.a, d.a, e.a, b.stash + i, acc, lane);
    forward_lanes<kF>(x.b, d.b, e.b, b.stash + i + Simd::kLanes, acc, lane + 1);
  }

  template <Features kF, class Transform>
  static inline F backward_lanes(const Block<Transform>& b, F x, F stashed, F weight) {
    F g;
    if constexpr (kF.general) {
      const F d = b.transform.minus(x, b.max);
      const F e = kF.read_stash ? stashed : Simd::exp(d);
      const F logp = Simd::sub(Simd::max(Simd::set(-200), d), b.log_sum);
      g = Simd::fma(e, Simd::fma(b.prob_logp, logp, b.prob), Simd::mul(b.uniform, weight));
    } else {
      const F e = kF.read_stash ? stashed : Simd::exp(b.transform.minus(x, b.max));
      g = Simd::fma(e, b.prob, b.uniform);
    }
    return b.transform.times_derivative(g, x);
  }

  // kPair elements at i; with kMasked n of them, the hole left out. Both directions: the old stash is read before the new one is
  // written.
  template <Features kF, bool kMasked, class Transform>
  [[gnu::always_inline]] static inline void step(const Block<Transform>& b, std::int64_t i, int n, Accumulators& acc, int lane) {
    constexpr bool kNeedsX = kF.backward && (!kF.read_stash || kF.general || Transform::kDerivativeNeedsX);
    const bool partial = kMasked && n < kPair;
    Pair stashed{}, previous{}, weight{};
    if constexpr (kF.read_stash) stashed = {Simd::load(b.previous_stash + i), Simd::load(b.previous_stash + i + Simd::kLanes)};
    if constexpr (kNeedsX) previous = partial ? Simd::load_pair_partial(b.previous_x + i, n, 0) : Simd::load_pair(b.previous_x + i);
    if constexpr (kF.general) {
      weight = {Simd::set(1), Simd::set(1)};
      if (b.class_weights != nullptr) weight = Simd::load_weights(b.class_weights + i, n, b.dx);
    }
    if constexpr (kF.forward) forward_step<kF, kMasked>(b, i, n, acc, lane);
    if constexpr (kF.backward) {
      const Pair g = {backward_lanes<kF>(b, previous.a, stashed.a, weight.a), backward_lanes<kF>(b, previous.b, stashed.b, weight.b)};
      if (partial) {
        Simd::store_pair_partial(b.dx + i, g, n);
      } else if constexpr (kF.stream) {
        Simd::stream_pair(b.dx + i, g);
      } else {
        Simd::store_pair(b.dx + i, g);
      }
    }
  }

  // Columns [begin, end) of a block, a multiple of 2 * kPair from its start: element i always meets the same accumulator.
  template <Features kF, class Transform>
  [[gnu::noinline]] static void full_steps(const Block<Transform>& block, std::int64_t begin, std::int64_t end, Accumulators& out) {
    const Block<Transform> b = block;
    Accumulators acc = out;
    for (std::int64_t i = begin; i < end; i += 2 * kPair) {
      step<kF, false>(b, i, kPair, acc, 0);
      step<kF, false>(b, i + kPair, kPair, acc, 2);
    }
    out = acc;
  }

  template <Features kF, class Transform>
  [[gnu::noinline]] static void masked_steps(const Block<Transform>& b, std::int64_t begin, std::int64_t end, Accumulators& acc) {
    for (std::int64_t i = begin; i < end; i += kPair) {
      const int n = static_cast<int>(end - i < kPair ? end - i : kPair);
      step<kF, true>(b, i, n, acc, (i - begin) % (2 * kPair) == 0 ? 0 : 2);
    }
  }

  template <Features kF, class Transform>
  static void loop(const Block<Transform>& b, std::int64_t n, Accumulators& acc) {
    constexpr std::int64_t kStep = 2 * kPair;
    const std::int64_t full = n - n % kStep, hole = b.hole - b.hole % kStep;
    if (kF.forward && b.hole >= 0 && hole < full) {
      full_steps<kF>(b, 0, hole, acc);
      masked_steps<kF>(b, hole, hole + kStep, acc);
      full_steps<kF>(b, hole + kStep, full, acc);
    } else {
      full_steps<kF>(b, 0, full, acc);
    }
    if (full < n) masked_steps<kF>(b, full, n, acc);
  }

  // ------------------------------------------------------------------------------------------------------------- forward

  // A row's running sums, relative to `reference`. Blocks add into double: 75 blocks cost no digits.
  struct Running {
    double sum = 0, entropy = 0, collision = 0, smoothing = 0, smoothing_weight = 0;
    float raw_max = -kInfinity;  // of x, the target's included
    float reference = -kInfinity;
    std::int64_t max_start = 0;  // of the first block that holds raw_max

    // -inf until a finite logit was seen: then nothing is there to be rescaled, and exp(-inf - 0) = 0 for all that is.
    float safe_reference() const { return reference == -kInfinity ? 0 : reference; }
    void move_reference(float to) {
      const double factor = reference == -kInfinity ? 1 : __builtin_exp(static_cast<double>(reference) - to);
      const double shift = reference == -kInfinity ? -static_cast<double>(to) : static_cast<double>(reference) - to;
      entropy = factor == 0 ? 0 : factor * (entropy + (sum == 0 ? 0 : shift * sum));
      sum *= factor;
      collision *= factor * factor;
      smoothing += smoothing_weight == 0 ? 0 : shift * smoothing_weight;
      reference = to;
    }
  };

  static float block_max(const T* x, std::int64_t n) {
    F m0 = Simd::set(-kInfinity), m1 = m0;
    std::int64_t i = 0;
    for (; i + kPair <= n; i += kPair) {
      const Pair v = Simd::load_pair(x + i);
      m0 = Simd::max(v.a, m0);
      m1 = Simd::max(v.b, m1);
    }
    if (i < n) {
      const Pair v = Simd::load_pair_partial(x + i, static_cast<int>(n - i), -kInfinity);
      m0 = Simd::max(v.a, m0);
      m1 = Simd::max(v.b, m1);
    }
    return Simd::reduce_max(Simd::max(m0, m1));
  }

  // sum_j c_j (z_j - reference) of a block, and the sum of its c_j. A loop of its own, over logits that lie in L1: the target is
  // in here, and -inf must stay -inf.
  template <class Transform>
  static void smoothing_block(const Transform& transform, const T* x, const float* weights, std::int64_t n, Running& r) {
    const F reference = Simd::set(r.safe_reference()), zero = Simd::set(0);
    F sum0 = zero, sum1 = zero, w0 = zero, w1 = zero;
    for (std::int64_t i = 0; i < n; i += kPair) {
      const int count = static_cast<int>(n - i < kPair ? n - i : kPair);
      const bool partial = count < kPair;
      const Pair v = partial ? Simd::load_pair_partial(x + i, count, 0) : Simd::load_pair(x + i);
      Pair d = {transform.minus(v.a, reference), transform.minus(v.b, reference)};
      if (partial) d = Simd::keep(d, count, -1, x);
      if (weights == nullptr) {
        sum0 = Simd::add(sum0, d.a);
        sum1 = Simd::add(sum1, d.b);
      } else {
        const Pair w = Simd::load_weights(weights + i, count, x);
        sum0 = Simd::fma(d.a, w.a, sum0);
        sum1 = Simd::fma(d.b, w.b, sum1);
        w0 = Simd::add(w0, w.a);
        w1 = Simd::add(w1, w.b);
      }
    }
    r.smoothing += Simd::reduce_add(Simd::add(sum0, sum1));
    r.smoothing_weight += weights == nullptr ? static_cast<double>(n) : Simd::reduce_add(Simd::add(w0, w1));
  }

  template <Features kF, class Transform>
  static void run_block(const Block<Transform>& b, std::int64_t n, Running& r, float* out_max) {
    Accumulators acc;
    loop<kF>(b, n, acc);
    const float max = acc.total_max();
    if (out_max != nullptr) *out_max = max;
    if constexpr (kF.forward) {
      r.sum += Accumulators::total(acc.sum);
      if constexpr (kF.entropy) r.entropy += Accumulators::total(acc.entropy);
      if constexpr (kF.collision) r.collision += Accumulators::total(acc.collision);
    }
  }

  template <bool kStash, class Transform>
  static void forward_only(const Block<Transform>& b, std::int64_t n, std::uint32_t sums, Running& r, float* max) {
    if (sums & kCollisionSum) {
      run_block<Features{.forward = true, .write_stash = kStash, .entropy = true, .collision = true}>(b, n, r, max);
    } else if (sums & kEntropySum) {
      run_block<Features{.forward = true, .write_stash = kStash, .entropy = true}>(b, n, r, max);
    } else {
      run_block<Features{.forward = true, .write_stash = kStash}>(b, n, r, max);
    }
  }

  template <bool kStream, class Transform>
  static void interleaved(const Block<Transform>& b, std::int64_t n, std::uint32_t sums, Running& r, float* max) {
    constexpr Features kPlain{.forward = true, .write_stash = true, .backward = true, .read_stash = true, .stream = kStream};
    constexpr Features kEntropy{
        .forward = true, .write_stash = true, .entropy = true, .backward = true, .read_stash = true, .stream = kStream};
    if (sums & kEntropySum) {
      run_block<kEntropy>(b, n, r, max);
    } else {
      run_block<kPlain>(b, n, r, max);
    }
  }

  // Does the block once with the reference as it is and, if its maximum turns out to exceed that by more than kMaxLag, again
  // (forward only: the backward half has been done) with the maximum as the reference.
  template <class Transform>
  static void forward_block(const ForwardRow& row, const BackwardRow* previous, std::int64_t start, std::int64_t n, Running& r) {
    const T* x = static_cast<const T*>(row.x) + start;
    Block<Transform> b(row.transform);
    b.x = x;
    if (row.target >= start && row.target < start + n) b.hole = row.target - start;
    if (start == 0) {
      r.raw_max = block_max(x, n);
      r.reference = row.transform.value(r.raw_max);
    }
    b.reference = Simd::set(r.safe_reference());
    if (row.stash != nullptr) b.stash = row.stash + start;
    const Running before = r;
    float max = -kInfinity;
    if (previous != nullptr) {
      set_backward(b, *previous, start);
      if (previous->stream && is_aligned(b.dx)) {
        interleaved<true>(b, n, row.sums, r, &max);
      } else {
        interleaved<false>(b, n, row.sums, r, &max);
      }
    } else if (row.stash != nullptr) {
      forward_only<true>(b, n, row.sums, r, &max);
    } else {
      forward_only<false>(b, n, row.sums, r, &max);
    }
    if (max > r.raw_max) {
      r.raw_max = max;
      r.max_start = start;
      const float z = row.transform.value(max);
      if (z > r.reference + kMaxLag || r.reference == -kInfinity) {
        r = before;
        r.raw_max = max;
        r.max_start = start;
        r.move_reference(z);
        b.reference = Simd::set(r.safe_reference());
        if (row.stash != nullptr) {
          forward_only<true>(b, n, row.sums, r, &max);
        } else {
          forward_only<false>(b, n, row.sums, r, &max);
        }
      }
    }
    if (row.sums & kSmoothingSum) {
      const float* weights = row.class_weights == nullptr ? nullptr : row.class_weights + start;
      smoothing_block(b.transform, x, weights, n, r);
    }
  }

  static bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 64 == 0; }

  template <class Transform>
  static void forward_row(ForwardRow& row, const BackwardRow* previous) {
    Running r;
    std::int64_t index = 0;
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block, ++index) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      forward_block<Transform>(row, previous, start, n, r);
      if (row.references != nullptr) row.references[index] = r.safe_reference();
    }
    finish(row, r);
  }

  // Running sums -> row state: from the reference to the true maximum, and the target's own terms where they belong.
  static void finish(ForwardRow& row, Running& r) {
    const T* x = static_cast<const T*>(row.x);
    RowState& s = row.state;
    s = RowState{};
    const float max = row.transform.value(r.raw_max);
    const bool is_finite = __builtin_isfinite(max) && __builtin_isfinite(r.sum);
    if (!is_finite && has_nan(x, row.columns)) {
      s.max = s.sum = s.target = s.entropy_sum = s.collision_sum = s.smoothing_sum = __builtin_nanf("");
      return;
    }
    if (row.target >= 0) s.target = row.transform.value(Simd::to_float(x[row.target]));
    if (max != -kInfinity) r.move_reference(max);
    s.max = max;
    s.sum = static_cast<float>(r.sum);
    if (row.sums & kArgmax) s.argmax = first_of(x + r.max_start, row.columns - r.max_start, r.raw_max) + r.max_start;
    if (row.sums & kSmoothingSum) s.smoothing_sum = static_cast<float>(r.smoothing);
    const double d = static_cast<double>(s.target) - max;
    const double e = s.target == -kInfinity ? 0 : __builtin_exp(d);
    if (row.sums & kEntropySum) s.entropy_sum = static_cast<float>(r.entropy + (e == 0 ? 0 : d * e));
    if (row.sums & kCollisionSum) s.collision_sum = static_cast<float>(r.collision + e * e);
  }

  static bool has_nan(const T* x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      const float v = Simd::to_float(x[i]);
      if (v != v) return true;
    }
    return false;
  }

  // The first index that holds `value`, which is known to be there and to be the maximum.
  static std::int64_t first_of(const T* x, std::int64_t n, float value) {
    std::int64_t i = 0;
    while (i + kPair <= n && block_max(x + i, kPair) != value) i += kPair;
    while (i + 1 < n && Simd::to_float(x[i]) != value) ++i;
    return i;
  }

  // ------------------------------------------------------------------------------------------------------------ backward

  // A block's stash is relative to that block's reference: the factor exp(reference - max) goes into the coefficients.
  template <class Transform>
  static void set_backward(Block<Transform>& b, const BackwardRow& row, std::int64_t start) {
    const float factor =
        row.stash == nullptr ? 1 : static_cast<float>(__builtin_exp(static_cast<double>(row.references[start / row.vocab_block]) - row.max));
    // Scaled: dz/dx is one constant, taken in here. Softcap: times_derivative has all of it.
    const float slope = Transform::kDerivativeNeedsX ? 1 : row.transform.scale;
    b.previous_x = static_cast<const T*>(row.x) + start;
    b.dx = static_cast<T*>(row.dx) + start;
    b.previous_stash = row.stash + start;
    b.class_weights = row.class_weights == nullptr ? nullptr : row.class_weights + start;
    b.max = Simd::set(row.max);
    b.log_sum = Simd::set(row.log_sum);
    b.prob = Simd::set(row.prob * slope * factor);
    b.prob_logp = Simd::set(row.prob_logp * slope * factor);
    b.uniform = Simd::set(row.uniform * slope);
  }

  static bool is_general(const BackwardRow& row) { return row.prob_logp != 0 || (row.uniform != 0 && row.class_weights != nullptr); }

  template <bool kStash, bool kGeneral, class Transform>
  static void backward_only(const Block<Transform>& b, std::int64_t n, bool stream) {
    Accumulators unused;
    if (stream) {
      loop<Features{.backward = true, .read_stash = kStash, .general = kGeneral, .stream = true}>(b, n, unused);
    } else {
      loop<Features{.backward = true, .read_stash = kStash, .general = kGeneral}>(b, n, unused);
    }
  }

  template <class Transform>
  static void backward_row(const BackwardRow& row) {
    const bool general = is_general(row);
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      Block<Transform> b(row.transform);
      set_backward(b, row, start);
      const bool stream = row.stream && is_aligned(b.dx);
      if (row.stash != nullptr && general) {
        backward_only<true, true>(b, n, stream);
      } else if (row.stash != nullptr) {
        backward_only<true, false>(b, n, stream);
      } else if (general) {
        backward_only<false, true>(b, n, stream);
      } else {
        backward_only<false, false>(b, n, stream);
      }
    }
  }

  template <class Transform>
  static void run_transformed(ForwardRow* next, const BackwardRow* previous) {
    const bool interleave = next != nullptr && previous != nullptr && next->stash != nullptr && previous->stash != nullptr &&
                            !is_general(*previous) && !(next->sums & kCollisionSum) && next->columns == previous->columns;
    if (interleave) {
      forward_row<Transform>(*next, previous);
    } else {
      if (previous != nullptr) backward_row<Transform>(*previous);
      if (next != nullptr) forward_row<Transform>(*next, nullptr);
    }
    if (previous != nullptr && previous->stream) Simd::fence();
  }

 public:
  static void run(ForwardRow* next, const BackwardRow* previous) {
    const LogitTransform& t = next != nullptr ? next->transform : previous->transform;
    if (t.softcap > 0) {
      run_transformed<Softcap<Simd>>(next, previous);
    } else if (t.scale != 1) {
      run_transformed<Scaled<Simd>>(next, previous);
    } else {
      run_transformed<Identity<Simd>>(next, previous);
    }
  }
};

// See KernelTable::exp_sum.
template <class Simd>
float exp_sum(const float* x, std::int64_t count, std::int64_t repeats) {
  using F = typename Simd::F;
  F sum[4] = {Simd::set(0), Simd::set(0), Simd::set(0), Simd::set(0)};
  for (std::int64_t r = 0; r < repeats; ++r) {
    for (std::int64_t i = 0; i + 4 * Simd::kLanes <= count; i += 4 * Simd::kLanes) {
      for (int k = 0; k < 4; ++k) sum[k] = Simd::add(sum[k], Simd::exp(Simd::load(x + i + k * Simd::kLanes)));
    }
    asm volatile("" : : "r"(x) : "memory");  // the next repeat is not the same work
  }
  return Simd::reduce_add(Simd::add(Simd::add(sum[0], sum[1]), Simd::add(sum[2], sum[3])));
}

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_SWEEPS_H_
