// AMX without AMX: see trapped_tiles.cpp.
#pragma once

#include <atomic>
#include <cstdint>

#include "backends/cpu/isa/amx_support.h"
#include "backends/cpu/isa/processor.h"

namespace tileloss::test {

using impl::cpu::AmxSupport;
using impl::cpu::Processor;

// What the library hears from now on; at first kReady, and of a processor without a name.
void answer_amx(AmxSupport support);
void answer_processor(const Processor& processor);
std::int64_t products_so_far();  // of tiles, by all threads
bool tiles_are_held();           // by this thread

}  // namespace tileloss::test
