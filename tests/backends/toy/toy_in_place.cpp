// TILELOSS_TEST_DEVICE=toy: the toy device in the CPU's place.
#include <cstdlib>
#include <cstring>

#include "tests/backends/copied_views.h"
#include "tests/backends/toy/toy_backend.h"

namespace tileloss::test {
namespace {

class Toy final : public EmulatedDevice {
 public:
  const impl::Backend& backend() const override { return backend_; }
  impl::Status begin(const impl::Problem& problem, std::unique_ptr<impl::Call>* call) override {
    return backend_.begin(problem, {}, {}, call);
  }
  void* allocate(std::size_t bytes) override { return backend_.memory().allocate(bytes); }
  void release(void* data) override { backend_.memory().release(data); }
  void queue(std::function<void()> task) override { backend_.memory().queue(std::move(task)); }
  void synchronise() override { backend_.memory().synchronise(); }

 private:
  ToyBackend backend_;
};

[[maybe_unused]] const bool is_on = [] {
  const char* const device = std::getenv("TILELOSS_TEST_DEVICE");
  if (device == nullptr || std::strcmp(device, "toy") != 0) return false;
  static Toy toy;
  take_the_cpus_place(&toy);
  return true;
}();

}  // namespace
}  // namespace tileloss::test
