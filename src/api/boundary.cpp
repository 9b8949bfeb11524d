#include "api/boundary.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>

namespace tileloss::impl::api {
namespace {

constexpr char kOutOfMemory[] = "out of memory";  // kept in place of a message that there is no room for

void drop(void* message) {
  if (message != kOutOfMemory) std::free(message);
}

// Not a thread_local: its destructor is registered, and in a library loaded late it is itself allocated, at a thread's first use.
// Where the heap is exhausted the C library ends the process then.
const pthread_key_t message_key = [] {
  pthread_key_t key = ~pthread_key_t{};  // none, of which nothing is kept
  pthread_key_create(&key, &drop);
  return key;
}();

}  // namespace

tileloss_status report(tileloss_status code, const char* message) noexcept {
  if (code == TILELOSS_OK) return code;
  drop(pthread_getspecific(message_key));
  char* const kept = strdup(message);
  if (pthread_setspecific(message_key, kept != nullptr ? kept : kOutOfMemory) != 0) drop(kept);
  return code;
}

const char* last_error() noexcept {
  const auto* message = static_cast<const char*>(pthread_getspecific(message_key));
  return message != nullptr ? message : "";
}

}  // namespace tileloss::impl::api
