// The tile registers of AMX and the instructions on them, in plain C++, after the operation sections of Intel's Software
// Developer's Manual: what code for AMX runs on where there is none.
#pragma once

#include <cstdint>

namespace tileloss::test {

class TileRegisters {
 public:
  static constexpr int kTiles = 8, kRows = 16, kWords = 16;

  // LDTILECFG. The operand's 64 bytes: palette 1, no row to go on at, eight tiles of 16 rows of 64 bytes, 0 elsewhere; anything
  // else that would be valid is not what the kernels ask for, and fails here. Tiles are 0 afterwards.
  void configure(const void* operand);
  void release();
  bool configured() const { return configured_; }

  // The others fail if the tiles are not configured, where the hardware raises #UD.
  void zero(int tile);
  void load(int tile, const void* p, std::int64_t stride);
  void store(int tile, void* p, std::int64_t stride) const;
  // TDPBF16PS: in each row of the sum, even and odd elements along k have sums of their own, in the order of k and fused, which
  // are added to each other and then to what was there. All of it to nearest even; subnormal numbers are 0 going in and out.
  void add_products(int sum, int left, int right);

 private:
  void check() const;

  struct Tile {
    std::uint32_t words[kRows][kWords];
  };
  Tile tiles_[kTiles];
  bool configured_;
};

float fused_without_subnormals(float a, float b, float sum);
float added_without_subnormals(float a, float b);

}  // namespace tileloss::test
