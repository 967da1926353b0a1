// SPDX-License-Identifier: Apache-2.0
//
// Sizes and durations as people type and read them. Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_UNITS_H_
#define RESIDENCY_MECHANISMS_UNITS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace residency {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

// Bytes from "12GiB", "500MB", "1.5GiB" or "4096". Known units: B, KB, MB, GB, TB (powers of 1000) and
// KiB, MiB, GiB, TiB (powers of 1024), in any case. INVALID_ARGUMENT/BAD_SIZE names the text and the
// known units: for an unknown unit, a negative or empty number, a fraction of a byte, or a value over
// 2^64-1.
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);

// A duration from "500ms", "5s", "1m30s", "2h" (absl's syntax). INVALID_ARGUMENT/BAD_DURATION for a
// bare number, a negative or an unbounded duration.
absl::StatusOr<absl::Duration> ParseDuration(std::string_view text);

// "11.22 GiB", "640.0 MiB", "17 B": for people. JSON and refusals carry plain bytes.
std::string FormatBytes(uint64_t bytes);

// `value` rounded up to a multiple of `alignment`, which is a power of two. The caller has checked that
// the result fits 64 bits.
constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }

// `from` less `what`, and 0 where that is below 0.
constexpr uint64_t SaturatingSubtract(uint64_t from, uint64_t what) { return from > what ? from - what : 0; }

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_UNITS_H_
