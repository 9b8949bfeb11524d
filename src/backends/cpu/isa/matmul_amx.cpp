// The products of backends/cpu/amx/matmul_tiles.h on AMX. The tile instructions are written out: the compiler's intrinsics
// want their register numbers as literals of the source, and GCC 12's neither order loads behind the stores that fill what they
// read nor keep the stores of a configuration that is built on the stack.
#include "backends/cpu/amx/matmul_tiles.h"
#include "backends/cpu/amx/tile_gradient.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/simd/simd_amx.h"

namespace tileloss::impl::cpu {
namespace amx {

// Operand of LDTILECFG: all eight tiles of 16 rows of 64 bytes.
struct alignas(64) Configuration {
  std::uint8_t palette = 1, start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Configuration) == 64);
constexpr Configuration kConfiguration;

class Tiles {
 public:
  Tiles() { asm volatile("ldtilecfg %0" : : "m"(kConfiguration)); }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int t>
  [[gnu::always_inline]] void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(t));
  }
  template <int t>
  [[gnu::always_inline]] void load(const float* p, std::int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(t), "r"(p), "r"(stride) : "memory");
  }
  template <int t>
  [[gnu::always_inline]] void load_once(const float* p, std::int64_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(t), "r"(p), "r"(stride) : "memory");
  }
  template <int t>
  [[gnu::always_inline]] void store(float* p, std::int64_t stride) {  // NOLINT(readability-non-const-parameter): asm writes there
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(t), "r"(p), "r"(stride) : "memory");
  }
  template <int sum, int left, int right>
  [[gnu::always_inline]] void add_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(left), "i"(right));
  }

  struct Awake {
    __m512 x = _mm512_setzero_ps();
  };
  [[gnu::always_inline]] static void keep_awake(Awake& awake) { asm volatile("vaddps %0, %0, %0" : "+v"(awake.x)); }
};

using Matmul = TileMatmul<Simd, Tiles, MatmulKernels<Simd, 8, 3>>;
constexpr TileTable kTileTable = {&Matmul::multiply_softmax, &TileGradient<Simd>::run};
constexpr MatmulTable matmul_table() {
  MatmulTable table = Matmul::table();
  table.tiles = &kTileTable;
  return table;
}

}  // namespace amx

const MatmulTable kAmxMatmul = amx::matmul_table();

}  // namespace tileloss::impl::cpu
