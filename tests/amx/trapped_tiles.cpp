// Runs the library's AMX code where there is no AMX: the tile instructions raise SIGILL, and the handler does on TileRegisters
// what they say. So it is the shipped machine code that runs here, its addresses, strides and register numbers included; what
// stays unproven is that the hardware does what its manual says. This program also answers for the machine
// (backends/cpu/isa/amx_support.h).
//
// Where there is AMX, the kernel is not asked for permission here, and so raises SIGILL all the same for what touches a tile.
// Configuring and releasing them touch none, and the processor does that itself: the first of the others then finds TileRegisters
// as they must be configured.
#include "tests/amx/trapped_tiles.h"

#include <cpuid.h>
#include <ucontext.h>

#include <csignal>
#include <cstdint>
#include <cstring>

#include "tests/amx/tile_registers.h"

namespace tileloss::test {
namespace {

AmxSupport answer = AmxSupport::kReady;
Processor processor;
std::atomic<std::int64_t> trapped_products = 0;
thread_local TileRegisters registers;

std::uint32_t read_xcr(std::uint32_t number) {
  std::uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(number));
  return low;
}

// Whether LDTILECFG runs: the processor has tiles, and the system keeps their configuration.
bool find_whether_processor_configures() {
  constexpr unsigned int kAmxTile = 1U << 24, kTileConfiguration = 1U << 17;
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_OSXSAVE) == 0) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kAmxTile) == 0) return false;
  return (read_xcr(0) & kTileConfiguration) != 0;
}
const bool processor_configures = find_whether_processor_configures();

// As the processor was told to: TileRegisters take nothing else.
void configure_as_processor() {
  struct alignas(64) {
    std::uint8_t palette = 1, rest[15] = {};
    std::uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } configuration;
  registers.configure(&configuration);
}

// One of the instructions: VEX.128 with three bytes, map 0F38, and their one or two operands.
class Instruction {
 public:
  explicit Instruction(ucontext_t& context)
      : context_(context), at_(reinterpret_cast<const std::uint8_t*>(context.uc_mcontext.gregs[REG_RIP])) {
    if (at_[0] != 0xC4 || (at_[1] & 0x1F) != 2 || (at_[2] & 0x84) != 0) return;
    prefix_ = at_[2] & 3;
    opcode_ = at_[3];
    is_one_ = true;
  }

  // LDTILECFG and TILERELEASE, which such a processor runs itself.
  bool is_the_processors() const { return processor_configures && is_one_ && opcode_ == 0x49 && prefix_ == kNone; }

  // False if it is none of them.
  bool run() {
    if (!is_one_) return false;
    const bool in_memory = at_[4] >> 6 != 3;
    const int reg = at_[4] >> 3 & 7, rm = at_[4] & 7;
    if (processor_configures && !registers.configured() && !is_the_processors()) configure_as_processor();
    if (opcode_ == 0x49 && prefix_ == kNone && in_memory) {
      registers.configure(reinterpret_cast<const void*>(address().first));
    } else if (opcode_ == 0x49 && prefix_ == kNone && at_[4] == 0xC0) {
      registers.release();
    } else if (opcode_ == 0x49 && prefix_ == kF2 && !in_memory && rm == 0) {
      registers.zero(reg);
    } else if (opcode_ == 0x4B && in_memory && rm == 4 && prefix_ != kNone) {
      const auto [start, stride] = address();
      if (prefix_ == kF3) {
        registers.store(reg, reinterpret_cast<void*>(start), stride);
      } else {
        registers.load(reg, reinterpret_cast<const void*>(start), stride);  // F2, and with the hint 66
      }
    } else if (opcode_ == 0x5C && prefix_ == kF3 && !in_memory) {
      registers.add_products(reg, rm, ~at_[2] >> 3 & 7);
      ++trapped_products;
    } else {
      return false;
    }
    context_.uc_mcontext.gregs[REG_RIP] += length_;
    return true;
  }

 private:
  enum Prefix { kNone, k66, kF3, kF2 };

  std::int64_t general(int number) const {
    constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context_.uc_mcontext.gregs[kOrder[number]];
  }

  struct Address {
    std::int64_t first, stride;
  };
  // Of the operand in memory; sets the instruction's length. The stride is the index register's.
  Address address() {
    const int mod = at_[4] >> 6, rm = at_[4] & 7;
    const int base_high = (at_[1] & 0x20) != 0 ? 0 : 8, index_high = (at_[1] & 0x40) != 0 ? 0 : 8;
    int base = rm + base_high, bytes = 5;
    std::int64_t stride = 0;
    if (rm == 4) {
      const int sib = at_[bytes++], index = (sib >> 3 & 7) + index_high;
      base = (sib & 7) + base_high;
      if (index != 4) stride = general(index) << (sib >> 6);
    }
    const bool no_base = mod == 0 && base % 8 == 5;
    const int displacement_bytes = mod == 1 ? 1 : mod == 2 || no_base ? 4 : 0;
    std::int64_t start = 0;
    if (displacement_bytes == 1) start = static_cast<std::int8_t>(at_[bytes]);
    if (displacement_bytes == 4) {
      std::int32_t displacement = 0;
      std::memcpy(&displacement, at_ + bytes, sizeof displacement);
      start = displacement;
    }
    length_ = bytes + displacement_bytes;
    if (!no_base) return {start + general(base), stride};
    return {rm == 4 ? start : start + context_.uc_mcontext.gregs[REG_RIP] + length_, stride};
  }

  ucontext_t& context_;
  const std::uint8_t* at_;
  bool is_one_ = false;
  int prefix_ = kNone, opcode_ = 0, length_ = 5;
};

// Runs those that follow at once too: a trap takes far longer than what it is for.
void on_illegal_instruction(int signal, siginfo_t*, void* context) {
  ucontext_t& machine = *static_cast<ucontext_t*>(context);
  if (!Instruction(machine).run()) {
    std::signal(signal, SIG_DFL);  // it is met again, and ends the program
    return;
  }
  while (true) {
    Instruction next(machine);
    if (next.is_the_processors() || !next.run()) return;
  }
}

const bool installed = [] {
  struct sigaction action {};
  action.sa_sigaction = &on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, nullptr) == 0;
}();

}  // namespace

void answer_amx(AmxSupport support) { answer = support; }
void answer_processor(const Processor& named) { processor = named; }
std::int64_t products_so_far() { return installed ? trapped_products.load() : -1; }
bool tiles_are_held() {
  if (!processor_configures) return registers.configured();
  constexpr std::uint32_t kInUse = 1, kTileConfiguration = 1U << 17;
  return (read_xcr(kInUse) & kTileConfiguration) != 0;
}

}  // namespace tileloss::test

namespace tileloss::impl::cpu {

AmxSupport amx_support() { return test::answer; }
const Processor& this_processor() { return test::processor; }

}  // namespace tileloss::impl::cpu
