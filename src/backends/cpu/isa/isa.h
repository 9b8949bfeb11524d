// Instruction sets: which are compiled in, which this machine has, which one to use.
#pragma once

#include <tileloss/tileloss.h>

#include <string>

#include "backends/cpu/sweep/row_kernel.h"

namespace tileloss::impl::cpu {

struct IsaChoice {
  tileloss_isa isa = TILELOSS_ISA_AUTO;
  std::string error;  // not empty: what was asked for is unknown, not compiled in, or not in this machine
  std::string note;   // why the machine's best is not avx512_amx; empty if it is, or if a certain one was asked for
};

const char* isa_name(tileloss_isa isa);
bool isa_supported(tileloss_isa isa);
const KernelTable& kernels(tileloss_isa isa);  // of a supported one

// "AMX: not on this CPU", "AMX: permission refused", ...; "" where avx512_amx is supported, and on ARM.
const char* why_without_amx();

// Of this machine, whatever TILELOSS_ISA says: the richest, but for avx512_bf16 where its products are slower than avx512's.
tileloss_isa best_isa();

// `wanted`, or with auto the one that the environment variable TILELOSS_ISA names, or the best.
IsaChoice choose_isa(tileloss_isa wanted);

}  // namespace tileloss::impl::cpu
