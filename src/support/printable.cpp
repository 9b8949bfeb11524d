#include "support/printable.h"

#include <algorithm>

#include "support/format.h"

namespace tileloss::tools {
namespace {

constexpr std::size_t kListed = 20;

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

}  // namespace

std::string shown(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return std::string(text);
  constexpr std::size_t kLongestTail = 3;  // of a character of UTF-8, behind its first byte
  std::size_t head = limit * 2 / 3, tail = text.size() - limit / 3;
  for (std::size_t i = 0; i < kLongestTail && head > 0 && is_continuation(text[head]); ++i) --head;
  for (std::size_t i = 0; i < kLongestTail && tail < text.size() && is_continuation(text[tail]); ++i) ++tail;
  return formatted("{}...[{} bytes]...{}", text.substr(0, head), tail - head, text.substr(tail));
}

std::string shown_list(std::span<const std::string> names) {
  std::string text;
  for (const std::string& name : names.first(std::min(names.size(), kListed))) text += (text.empty() ? "" : ", ") + shown(name);
  if (names.size() > kListed) text += formatted(" and {} more", names.size() - kListed);
  return text;
}

}  // namespace tileloss::tools
