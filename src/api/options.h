// Options structs through their field tables: defaults, ranges, identity.
#ifndef TILELOSS_API_OPTIONS_H_
#define TILELOSS_API_OPTIONS_H_

#include <cstdint>
#include <type_traits>

#include "api/status.h"
#include "losses/registry.h"

namespace tileloss::api {

// FNV-1a over plain values.
class Fingerprint {
 public:
  template <class T>
  requires std::is_arithmetic_v<T>
  void add(T value) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (std::size_t i = 0; i < sizeof value; ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001b3u;
  }
  void add(const char* text) {
    for (; *text != '\0'; ++text) add(*text);
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

void fill_defaults(const RegisteredLoss& loss, void* options);
// Every field in its range; numbers behind pointers only if `with_pointers`.
Status check_options(const RegisteredLoss& loss, const void* options, bool with_pointers);
// Everything but the values that may change from step to step.
void hash_options(const RegisteredLoss& loss, const void* options, Fingerprint& hash);

}  // namespace tileloss::api

#endif  // TILELOSS_API_OPTIONS_H_
