// The Tiles of backends/cpu/amx/matmul_tiles.h on TileRegisters, for any processor: its loop, edges and packing without the
// machine code.
#ifndef TILELOSS_TESTS_AMX_EMULATED_TILES_H_
#define TILELOSS_TESTS_AMX_EMULATED_TILES_H_

#include <cstdint>

#include "tests/amx/tile_registers.h"

namespace tileloss::test {

class EmulatedTiles {
 public:
  EmulatedTiles() {
    struct {
      std::uint8_t palette = 1, rest[15] = {};
      std::uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    registers_.configure(&configuration);
    ++taken;
  }
  ~EmulatedTiles() { --taken; }
  EmulatedTiles(const EmulatedTiles&) = delete;
  EmulatedTiles& operator=(const EmulatedTiles&) = delete;

  template <int t>
  void zero() {
    registers_.zero(t);
  }
  template <int t>
  void load(const float* p, std::int64_t stride) {
    registers_.load(t, p, stride);
  }
  template <int t>
  void load_once(const float* p, std::int64_t stride) {
    registers_.load(t, p, stride);
  }
  template <int t>
  void store(float* p, std::int64_t stride) {
    registers_.store(t, p, stride);
  }
  template <int sum, int left, int right>
  void add_products() {
    registers_.add_products(sum, left, right);
  }
  struct Awake {};
  static void keep_awake(Awake&) {}

  static inline thread_local int taken = 0;

 private:
  TileRegisters registers_;
};

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_AMX_EMULATED_TILES_H_
