// SPDX-License-Identifier: Apache-2.0
//
// What the fuzz targets share: the input read from front to back, so that a seed can be written by hand, and the check
// that ends the run.
#ifndef RESIDENCY_TESTS_FUZZ_FUZZ_INPUT_H_
#define RESIDENCY_TESTS_FUZZ_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace residency {

// Ends the process, which libFuzzer takes for a finding, where `holds` is false.
inline void Check(bool holds, std::string_view what) {
  if (holds) return;
  fprintf(stderr, "broken: %.*s\n", static_cast<int>(what.size()), what.data());
  abort();
}

// An input that has ended goes on as zeros.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }

  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return byte;
  }

  // Little-endian.
  uint64_t Integer(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= uint64_t{Byte()} << (8 * i);
    return value;
  }

  // A small number in one byte; behind 0xFF any.
  uint64_t Number() {
    const uint8_t byte = Byte();
    return byte == 0xFF ? Integer(8) : byte;
  }

  std::string Text(size_t bytes) {
    const std::string text(rest_.substr(0, std::min(bytes, rest_.size())));
    rest_.remove_prefix(text.size());
    return text;
  }

  // All up to `separator`, which is taken off, or to the end.
  std::string TextUntil(std::string_view separator) {
    const size_t end = rest_.find(separator);
    const std::string text(rest_.substr(0, end));
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + separator.size());
    return text;
  }

 private:
  std::string_view rest_;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_FUZZ_FUZZ_INPUT_H_
