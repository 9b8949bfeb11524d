// Options structs through their field tables: defaults, ranges, identity.
#include "api/options.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <string_view>

namespace tileloss::api {
namespace {

std::string text(double x) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, x).ptr;
  return {buffer, end};
}

std::string range(const tileloss_field& f) {
  if (f.type == TILELOSS_FIELD_CHOICE) return "one of " + std::string(f.choices) + " (0 to " + text(f.maximum) + ")";
  const bool has_upper = f.maximum < 0x1p62;
  std::string s = std::string("a number ") + (f.exclusive_minimum != 0 ? "> " : ">= ") + text(f.minimum);
  if (has_upper) s += " and <= " + text(f.maximum);
  if (f.has_absent != 0 && !std::isnan(f.default_value)) s += ", or " + text(f.default_value);
  return s;
}

bool is_absent(const tileloss_field& f, double x) {
  return f.has_absent != 0 && (std::isnan(f.default_value) ? std::isnan(x) : x == f.default_value);
}

bool in_range(const tileloss_field& f, double x) {
  if (is_absent(f, x)) return true;
  if (!std::isfinite(x)) return false;
  return (f.exclusive_minimum != 0 ? x > f.minimum : x >= f.minimum) && x <= f.maximum;
}

template <class T>
T read(const void* options, std::size_t offset) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(options) + offset, sizeof value);
  return value;
}

template <class T>
void write(void* options, std::size_t offset, T value) {
  std::memcpy(static_cast<std::byte*>(options) + offset, &value, sizeof value);
}

}  // namespace

void fill_defaults(const RegisteredLoss& loss, void* options) {
  std::memset(options, 0, loss.info.options_size);
  write(options, 0, loss.info.options_size);
  for (const tileloss_field& f : loss.fields) {
    switch (f.type) {
      case TILELOSS_FIELD_INT64: write(options, f.offset, static_cast<std::int64_t>(f.default_value)); break;
      case TILELOSS_FIELD_CHOICE: write(options, f.offset, static_cast<std::int32_t>(f.default_value)); break;
      case TILELOSS_FIELD_SCALAR: write(options, f.offset, tileloss_scalar{f.default_value, nullptr}); break;
      default: write(options, f.offset, f.default_value); break;
    }
  }
}

Status check_options(const RegisteredLoss& loss, const void* options, bool with_pointers) {
  for (const tileloss_field& f : loss.fields) {
    double x = 0;
    switch (f.type) {
      case TILELOSS_FIELD_INT64: x = static_cast<double>(read<std::int64_t>(options, f.offset)); break;
      case TILELOSS_FIELD_CHOICE: x = read<std::int32_t>(options, f.offset); break;
      case TILELOSS_FIELD_SCALAR: {
        const auto scalar = read<tileloss_scalar>(options, f.offset);
        if (scalar.pointer != nullptr && !with_pointers) continue;
        x = scalar_value(scalar);
        break;
      }
      default: x = read<double>(options, f.offset); break;
    }
    if (!in_range(f, x)) return expected(f.name, range(f), text(x));
  }
  return {};
}

void hash_options(const RegisteredLoss& loss, const void* options, Fingerprint& hash) {
  for (const tileloss_field& f : loss.fields) {
    switch (f.type) {
      case TILELOSS_FIELD_INT64: hash.add(read<std::int64_t>(options, f.offset)); break;
      case TILELOSS_FIELD_CHOICE: hash.add(read<std::int32_t>(options, f.offset)); break;
      case TILELOSS_FIELD_SCALAR: {
        const auto scalar = read<tileloss_scalar>(options, f.offset);
        hash.add(scalar.pointer == nullptr && is_absent(f, scalar.value));
        break;
      }
      default: hash.add(read<double>(options, f.offset)); break;
    }
  }
}

}  // namespace tileloss::api
