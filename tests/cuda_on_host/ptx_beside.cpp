#include "tests/cuda_on_host/ptx_beside.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cuda_on_host/host_calls.h"
#include "tests/cuda_on_host/ptx_machine.h"
#include "tests/cuda_on_host/ptx_program.h"
#include "tests/cuda_on_host/streams.h"

namespace cuda_on_host {
namespace {

// A machine's instruction takes 5 ns or so. Of a kernel's launches the first few are alike, those of one test: later ones are
// taken ever more sparsely, so that the cost grows with the logarithm of their number.
constexpr std::uint64_t kFirstLaunches = 4, kOneOf = 8;
constexpr std::uint64_t kMostThreads = 20000;      // a launch
constexpr std::size_t kMostMemory = 32 << 20;      // of all that is allocated, which is copied three times
constexpr std::size_t kMostRegisters = 128 << 20;  // bytes of a cluster's

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
// Both sides have the same 2^x, and doubles' functions right to the last place but one: nearly all numbers are the same bit by
// bit. Where a double of which a row's float32 is made is just between two of them, all columns differ in their last places, and
// so do the sums of theirs. The largest that all tests show: 3e-6 of a sum of such terms and 3e-7 where they cancel; of a
// gradient's column 1.2e-5, and 5e-9 where it is a difference.
template <class T>
bool are_close(const std::byte* at, const std::byte* other, double relative, double absolute) {
  const double a = read<T>(at), b = read<T>(other);
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::fabs(a - b) <= relative * std::max(std::fabs(a), std::fabs(b)) + absolute;
}
// Neighbours, or NaN both (in bfloat16 2.7e36, too); in bfloat16, whose numbers may be that small, what cancels as above.
bool are_halves_close(const std::byte* at, const std::byte* other, bool are_bfloat16) {
  const int a = read<std::int16_t>(at), b = read<std::int16_t>(other), x = a & 0x7fff, y = b & 0x7fff;
  constexpr int kSmall = std::bit_cast<std::uint32_t>(3e-8f) >> 16;
  return std::abs((a < 0 ? -x : x) - (b < 0 ? -y : y)) <= 1 || std::min(x, y) > 0x7c00 ||
         (are_bfloat16 && std::max(x, y) <= kSmall);
}
// What as a float32 would not be normal.
bool is_small_integer(const std::byte* at) {
  const auto bits = read<std::uint32_t>(at);
  return bits != 0 && bits < 1u << 23;
}

std::size_t bytes_of(PtxStore::Type type) { return type == PtxStore::Type::kDouble ? 8 : type == PtxStore::Type::kHalf ? 2 : 4; }
bool are_alike(PtxStore::Type type, bool are_bfloat16, const std::byte* a, const std::byte* b) {
  switch (type) {
    case PtxStore::Type::kDouble: return are_close<double>(a, b, 4e-6, 4e-7);
    case PtxStore::Type::kFloat: return are_close<float>(a, b, 2e-5, 3e-8);
    case PtxStore::Type::kHalf: return are_halves_close(a, b, are_bfloat16);
    case PtxStore::Type::kWord: return !is_small_integer(a) && !is_small_integer(b) && are_close<float>(a, b, 2e-5, 3e-8);
    default: return are_halves_close(a, b, are_bfloat16) && are_halves_close(a + 2, b + 2, are_bfloat16);
  }
}

// All that a kernel may write.
class Memory {
 public:
  Memory() {
    for (const auto& [at, piece] : devices().pieces) {
      if (!piece.is_host && !devices().device(piece.device).is_open) continue;
      pieces_[reinterpret_cast<std::byte*>(at)] = {bytes_, piece.bytes};
      bytes_ += piece.bytes;
    }
  }
  std::size_t bytes() const { return bytes_; }
  std::vector<std::byte> copy() const {
    std::vector<std::byte> all(bytes_);
    for (const auto& [at, piece] : pieces_) std::memcpy(all.data() + piece.offset, at, piece.bytes);
    return all;
  }
  void restore(const std::vector<std::byte>& all) const {
    for (const auto& [at, piece] : pieces_) std::memcpy(at, all.data() + piece.offset, piece.bytes);
  }
  // The copy's number where it has `at`, null where that is in no piece.
  std::byte* in(std::vector<std::byte>& all, const std::byte* at) const {
    auto piece = pieces_.upper_bound(const_cast<std::byte*>(at));
    if (piece == pieces_.begin()) return nullptr;
    --piece;
    const auto offset = static_cast<std::size_t>(at - piece->first);
    return offset < piece->second.bytes ? all.data() + piece->second.offset + offset : nullptr;
  }
  // Whether the copy is what is there now; says where it is not.
  bool is(const std::vector<std::byte>& all, const char* name) const {
    for (const auto& [at, piece] : pieces_) {
      const std::byte* const copied = all.data() + piece.offset;
      if (std::memcmp(at, copied, piece.bytes) == 0) continue;
      const auto first = static_cast<std::size_t>(std::mismatch(at, at + piece.bytes, copied).first - at);
      std::byte ours[8] = {}, nvccs[8] = {};
      const std::size_t begin = first / 8 * 8, count = std::min<std::size_t>(8, piece.bytes - begin);
      std::memcpy(ours, at + begin, count);
      std::memcpy(nvccs, copied + begin, count);
      std::fprintf(stderr, "cuda_on_host: byte %zu of %zu at %p after %s:\n", first, piece.bytes, static_cast<void*>(at), name);
      for (const auto& [who, bits] : {std::pair{"the host's", ours}, std::pair{"nvcc's", nvccs}}) {
        std::fprintf(stderr, "  %-10s from byte %zu: 0x%016llx, %.9g %.9g, %.17g\n", who, begin, read<unsigned long long>(bits),
                     static_cast<double>(read<float>(bits)), static_cast<double>(read<float>(bits + 4)), read<double>(bits));
      }
      return false;
    }
    return true;
  }

 private:
  struct Piece {
    std::size_t offset, bytes;
  };
  std::map<std::byte*, Piece> pieces_;
  std::size_t bytes_ = 0;
};

class Beside {
 public:
  explicit Beside(const char* folder) : files_(folder) {}
  ~Beside() {
    std::size_t ran = 0;
    std::uint64_t launches = 0;
    for (const std::string& name : files_.names()) {
      const Seen& seen = seen_[name];
      launches += seen.runs;
      if (seen.runs > 0) ++ran;
      if (seen.runs == 0) {
        std::fprintf(stderr, "cuda_on_host: not run as PTX: %s, launched %llu times\n", name.c_str(),
                     static_cast<unsigned long long>(seen.launches));
      }
    }
    std::fprintf(stderr, "cuda_on_host: %zu of %zu kernels of PTX beside the host's, %llu launches, 0 differed\n", ran,
                 files_.kernels(), static_cast<unsigned long long>(launches));
  }
  void run(const Kernel& kernel, Random& random);

 private:
  struct Seen {
    std::uint64_t launches = 0, runs = 0, next = 0;
  };
  const std::string& symbol_of(const void* function);

  PtxFiles files_;
  std::map<const void*, std::string> symbols_;
  std::map<std::string, Seen> seen_;
};

// Kernels are not exported: nm knows them. A file's own has an L in its name, which PTX's has not.
const std::string& Beside::symbol_of(const void* function) {
  if (const auto known = symbols_.find(function); known != symbols_.end()) return known->second;
  Dl_info binary{};
  dladdr(function, &binary);
  const std::unique_ptr<FILE, int (*)(FILE*)> nm(popen(("nm '" + std::string(binary.dli_fname) + "'").c_str(), "r"), pclose);
  constexpr const char* kOwn = "_ZN8tileloss4impl4cuda";
  char line[1 << 14];
  while (std::fgets(line, sizeof line, nm.get()) != nullptr) {
    char* end = nullptr;
    const auto at = static_cast<std::byte*>(binary.dli_fbase) + std::strtoull(line, &end, 16);
    std::string name(end);
    name = name.substr(std::min<std::size_t>(3, name.size()));
    if (!name.starts_with(kOwn)) continue;
    name.pop_back();
    if (name.starts_with(kOwn + std::string("L"))) name.erase(std::strlen(kOwn), 1);
    symbols_.try_emplace(at, name);
  }
  return symbols_[function];
}

void Beside::run(const Kernel& kernel, Random& random) {
  const std::string& name = symbol_of(kernel.function);
  if (name.empty()) return cuda_on_host::run(kernel, random);  // a test's own
  const PtxKernel* const ptx = files_.find(name);
  if (ptx == nullptr) {
    std::fprintf(stderr, "cuda_on_host: no PTX of the kernel %s\n", name.c_str());
    std::abort();
  }
  Seen& seen = seen_[name];
  const Memory memory;
  const std::uint64_t threads = std::uint64_t{kernel.grid.x} * kernel.block.x;
  const std::size_t registers = 8 * ptx->registers.size() * kernel.block.x * kernel.cluster;
  if (seen.launches++ < seen.next || threads > kMostThreads || memory.bytes() > kMostMemory || registers > kMostRegisters) {
    return cuda_on_host::run(kernel, random);
  }
  if (++seen.runs >= kFirstLaunches) seen.next = seen.launches + seen.launches / kOneOf;

  const std::vector<std::byte> before = memory.copy();
  PtxMachine machine(*ptx, kernel);
  machine.run();
  std::vector<std::byte> nvccs = memory.copy();
  memory.restore(before);
  cuda_on_host::run(kernel, random);
  for (const PtxStore& store : machine.stores()) {
    std::byte* const stored = memory.in(nvccs, store.at);
    if (stored != nullptr && are_alike(store.type, name.find("7Float16") == std::string::npos, stored, store.at))
      std::memcpy(stored, store.at, bytes_of(store.type));
  }
  if (!memory.is(nvccs, name.c_str())) std::abort();
}

Beside* beside() {
  static const char* const folder = std::getenv("TILELOSS_TEST_PTX");
  static const std::unique_ptr<Beside> only(folder == nullptr ? nullptr : new Beside(folder));
  return only.get();
}

}  // namespace

bool is_beside_ptx() { return beside() != nullptr; }

void run_beside_ptx(const Kernel& kernel, Random& random) {
  if (Beside* const both = beside(); both != nullptr && kernel.function != nullptr) return both->run(kernel, random);
  run(kernel, random);
}

}  // namespace cuda_on_host
