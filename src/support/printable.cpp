#include "support/printable.h"

#include <algorithm>
#include <cstdint>

#include "support/format.h"

namespace tileloss::tools {
namespace {

constexpr std::size_t kListed = 20;

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

// How many bytes the character at the start of `text` has, and its code; 0 bytes if it is no UTF-8.
struct Character {
  std::size_t bytes = 0;
  std::uint32_t code = 0;
};

Character first_character(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {1, lead};
  const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {};
  std::uint32_t code = lead & (0xFFU >> (bytes + 1));
  for (std::size_t i = 1; i < bytes; ++i) {
    if (!is_continuation(text[i])) return {};
    code = code << 6U | (static_cast<unsigned char>(text[i]) & 0x3FU);
  }
  constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};  // anything less has a shorter form
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  return code < kLeast[bytes] || code > 0x10FFFF || is_surrogate ? Character{} : Character{bytes, code};
}

// C0, DEL, C1; line and paragraph separators, directional marks, overrides and isolates.
bool is_control(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x61C || (code >= 0x200E && code <= 0x200F) ||
         (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
}

void append_escape(std::uint32_t code, std::string& out) {
  switch (code) {
    case '\n': out += "\\n"; return;
    case '\r': out += "\\r"; return;
    case '\t': out += "\\t"; return;
    default: out += code < 0x80 ? formatted("\\x{:02x}", code) : formatted("\\u{:04x}", code);
  }
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character character = first_character(text);
    if (character.bytes == 0) {
      out += formatted("\\x{:02x}", static_cast<unsigned char>(text[0]));
    } else if (is_control(character.code)) {
      append_escape(character.code, out);
    } else {
      out += text.substr(0, character.bytes);
    }
    text.remove_prefix(std::max<std::size_t>(character.bytes, 1));
  }
  return out;
}

std::string shown(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return escaped(text);
  constexpr std::size_t kLongestTail = 3;  // of a character of UTF-8, behind its first byte
  std::size_t head = limit * 2 / 3, tail = text.size() - limit / 3;
  for (std::size_t i = 0; i < kLongestTail && head > 0 && is_continuation(text[head]); ++i) --head;
  for (std::size_t i = 0; i < kLongestTail && tail < text.size() && is_continuation(text[tail]); ++i) ++tail;
  return formatted("{}...[{} bytes]...{}", escaped(text.substr(0, head)), tail - head, escaped(text.substr(tail)));
}

std::string shown_list(std::span<const std::string> names) {
  std::string text;
  for (const std::string& name : names.first(std::min(names.size(), kListed))) text += (text.empty() ? "" : ", ") + shown(name);
  if (names.size() > kListed) text += formatted(" and {} more", names.size() - kListed);
  return text;
}

}  // namespace tileloss::tools
