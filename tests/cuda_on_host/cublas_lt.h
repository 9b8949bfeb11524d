// cuBLASLt on the host: what the CUDA backend uses of it, in plain loops on a stream.
#pragma once

#include <cstdint>
#include <string>

namespace cuda_on_host {

struct Products {
  std::string missing;             // what the library lacks; empty: nothing
  std::int64_t searches = 0;       // for algorithms
  std::uint64_t fewest_rows = 0;   // products of fewer take algorithms that were found for so many, no others
  std::int64_t multiply_adds = 0;  // of all products that were queued
};
Products& products();

}  // namespace cuda_on_host
