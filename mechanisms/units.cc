// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/units.h"

#include <array>
#include <limits>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// Wide enough for 2^64-1 of the largest unit, so that overflow is a comparison at the end.
__extension__ using Wide = unsigned __int128;

constexpr std::string_view kKnownUnits = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB";
// 10^18 parts of the largest unit still fit Wide with room to spare.
constexpr size_t kMaxFractionDigits = 18;

struct Unit {
  const char* name;
  uint64_t bytes;
};

constexpr std::array<Unit, 9> kUnits = {{
    {"B", 1},
    {"KB", 1'000},
    {"MB", 1'000'000},
    {"GB", 1'000'000'000},
    {"TB", 1'000'000'000'000},
    {"KiB", kKiB},
    {"MiB", kMiB},
    {"GiB", kGiB},
    {"TiB", kGiB * 1024},
}};

absl::Status BadSize(std::string_view text, std::string_view why) {
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_SIZE",
                absl::StrFormat("size \"%s\": %s; a size is a number and one of the units %s (a bare number is bytes)",
                                text, why, kKnownUnits));
}

absl::Status BadDuration(std::string_view text, std::string_view why) {
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_DURATION",
                absl::StrFormat("duration \"%s\": %s; a duration is like 500ms, 5s, 1m30s or 2h, of the units ns, us, "
                                "ms, s, m and h",
                                text, why));
}

bool IsSpace(char c) { return absl::ascii_isspace(static_cast<unsigned char>(c)); }

std::string_view StripLeadingSpace(std::string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  return text;
}

std::string_view StripSpace(std::string_view text) {
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return StripLeadingSpace(text);
}

// Takes the digits off the front of `text`.
std::string_view TakeDigits(std::string_view* text) {
  size_t count = 0;
  while (count < text->size() && absl::ascii_isdigit(static_cast<unsigned char>((*text)[count]))) ++count;
  const std::string_view digits = text->substr(0, count);
  text->remove_prefix(count);
  return digits;
}

std::optional<uint64_t> DigitsValue(std::string_view digits) {
  Wide value = 0;
  for (const char digit : digits) {
    value = value * 10 + static_cast<unsigned>(digit - '0');
    if (value > std::numeric_limits<uint64_t>::max()) return std::nullopt;
  }
  return static_cast<uint64_t>(value);
}

std::optional<uint64_t> UnitBytes(std::string_view name) {
  if (name.empty()) return 1;
  for (const Unit& unit : kUnits) {
    if (absl::EqualsIgnoreCase(std::string(name), unit.name)) return unit.bytes;
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  std::string_view rest = StripSpace(text);
  if (rest.empty()) return BadSize(text, "it is empty");
  if (rest.front() == '-') return BadSize(text, "it is negative");
  const std::string_view whole_digits = TakeDigits(&rest);
  if (whole_digits.empty()) return BadSize(text, "it does not start with a number");
  std::string_view fraction_digits;
  if (!rest.empty() && rest.front() == '.') {
    rest.remove_prefix(1);
    fraction_digits = TakeDigits(&rest);
    if (fraction_digits.empty()) return BadSize(text, "no digit follows the point");
    while (!fraction_digits.empty() && fraction_digits.back() == '0') fraction_digits.remove_suffix(1);
  }
  const std::string_view unit_name = StripLeadingSpace(rest);
  const std::optional<uint64_t> unit_bytes = UnitBytes(unit_name);
  if (!unit_bytes.has_value()) return BadSize(text, absl::StrFormat("unknown unit \"%s\"", unit_name));
  if (fraction_digits.size() > kMaxFractionDigits) return BadSize(text, "it has more than 18 decimals");

  const std::optional<uint64_t> whole = DigitsValue(whole_digits);
  if (!whole.has_value()) return BadSize(text, "it is more than 2^64-1 bytes");
  Wide denominator = 1;
  for (size_t i = 0; i < fraction_digits.size(); ++i) denominator *= 10;
  // Eighteen digits always fit 64 bits.
  const Wide numerator = Wide{*DigitsValue(fraction_digits)} * *unit_bytes;
  const Wide bytes = Wide{*whole} * *unit_bytes + numerator / denominator;
  if (bytes > std::numeric_limits<uint64_t>::max()) return BadSize(text, "it is more than 2^64-1 bytes");
  if (numerator % denominator != 0) {
    return BadSize(text, absl::StrCat("it ends in a fraction of a byte (the whole number below is ",
                                      static_cast<uint64_t>(bytes), ")"));
  }
  return static_cast<uint64_t>(bytes);
}

absl::StatusOr<absl::Duration> ParseDuration(std::string_view text) {
  // absl takes "0" for a duration; one rule for all bare numbers is easier to remember.
  std::string_view digits = text;
  if (!TakeDigits(&digits).empty() && digits.empty()) return BadDuration(text, "it has no unit");
  absl::Duration duration;
  if (!absl::ParseDuration(std::string(text), &duration)) return BadDuration(text, "it is not a duration");
  if (duration < absl::ZeroDuration()) return BadDuration(text, "it is negative");
  if (duration == absl::InfiniteDuration()) return BadDuration(text, "it is unbounded");
  return duration;
}

std::string FormatBytes(uint64_t bytes) {
  struct Scale {
    std::string_view name;
    int shift;
    unsigned parts;  // of the unit, to which the figure is rounded
  };
  constexpr Scale kScales[] = {{"KiB", 10, 10},  {"MiB", 20, 10},  {"GiB", 30, 100},
                               {"TiB", 40, 100}, {"PiB", 50, 100}, {"EiB", 60, 100}};
  if (bytes < kKiB) return absl::StrCat(bytes, " B");
  std::string formatted;
  for (const Scale& scale : kScales) {
    const Wide rounded = (Wide{bytes} * scale.parts + (Wide{1} << (scale.shift - 1))) >> scale.shift;
    const uint64_t whole = static_cast<uint64_t>(rounded / scale.parts);
    const uint64_t fraction = static_cast<uint64_t>(rounded % scale.parts);
    formatted = scale.parts == 10 ? absl::StrFormat("%d.%01d %s", whole, fraction, scale.name)
                                  : absl::StrFormat("%d.%02d %s", whole, fraction, scale.name);
    // After rounding, so that 1023.99 MiB reads 1.00 GiB and not 1024.0 MiB.
    if (whole < 1024) break;
  }
  return formatted;
}

}  // namespace residency
