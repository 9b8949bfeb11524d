# nvcc, and what every file of the CUDA backend is compiled with. No contraction of a * b + c, as on the CPU (src/CMakeLists.txt):
# a difference of equal products would be a rounding error in place of 0.
find_program(TILELOSS_NVCC nvcc HINTS /usr/local/cuda/bin)
set(TILELOSS_NVCC_FLAGS -std=c++20 --expt-relaxed-constexpr -O3 -fmad=false
  -I ${PROJECT_SOURCE_DIR}/src -I ${PROJECT_SOURCE_DIR}/include)
