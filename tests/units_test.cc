// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/units.h"

#include <catch2/catch.hpp>
#include <string>

#include "mechanisms/refusal.h"

namespace residency {
namespace {

TEST_CASE("Sizes are read in powers of 1000, powers of 1024 and plain bytes") {
  const struct {
    const char* text;
    uint64_t bytes;
  } kCases[] = {
      {"0", 0},
      {"4096", 4096},
      {"17B", 17},
      {"500MB", 500'000'000},
      {"1KB", 1000},
      {"3GB", 3'000'000'000},
      {"2TB", 2'000'000'000'000},
      {"1KiB", 1024},
      {"64MiB", 67'108'864},
      {"12GiB", 12'884'901'888},
      {"1TiB", 1'099'511'627'776},
      {"12gib", 12'884'901'888},
      {"12 GiB", 12'884'901'888},
      {"  7mb ", 7'000'000},
      {"1.5GiB", 1'610'612'736},
      {"0.5KiB", 512},
      {"1.000", 1},
      {"1.25MB", 1'250'000},
      {"18446744073709551615", 18'446'744'073'709'551'615u},
      {"16777215TiB", 18'446'742'974'197'923'840u},
  };
  for (const auto& c : kCases) {
    INFO(c.text);
    const absl::StatusOr<uint64_t> bytes = ParseBytes(c.text);
    REQUIRE(bytes.ok());
    CHECK(*bytes == c.bytes);
  }
}

TEST_CASE("A size that is none is refused, and the refusal names it and the known units") {
  for (const char* text : {"",
                           "  ",
                           "GiB",
                           "-1",
                           "-1GiB",
                           "+1",
                           "1XiB",
                           "1K",
                           "1G",
                           "1.5",
                           "1.5B",
                           "0.1GiB",
                           "1.",
                           ".5GiB",
                           "1..5GiB",
                           "1e9",
                           "0x10",
                           "1,000",
                           "1 000",
                           "nan",
                           "inf",
                           "18446744073709551616",
                           "99999999999999999999999999999999",
                           "16777216TiB",
                           "18446744073709551615KB",
                           "1GiB1",
                           "12GiB x",
                           "0.0000000000000000005TiB"}) {
    INFO(text);
    const absl::StatusOr<uint64_t> bytes = ParseBytes(text);
    REQUIRE_FALSE(bytes.ok());
    CHECK(bytes.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(ReasonOf(bytes.status()) == "BAD_SIZE");
    const std::string message(bytes.status().message());
    CHECK(message.find(text) != std::string::npos);
    CHECK(message.find("KiB, MiB, GiB") != std::string::npos);
  }
}

TEST_CASE("A NUL inside a size does not end it") {
  CHECK_FALSE(ParseBytes(std::string_view("12\0GiB", 6)).ok());
  CHECK_FALSE(ParseBytes(std::string_view("12\0", 3)).ok());
}

TEST_CASE("Durations need a unit, are not negative and end") {
  CHECK(*ParseDuration("500ms") == absl::Milliseconds(500));
  CHECK(*ParseDuration("5s") == absl::Seconds(5));
  CHECK(*ParseDuration("1m30s") == absl::Seconds(90));
  CHECK(*ParseDuration("2h") == absl::Hours(2));
  CHECK(*ParseDuration("0s") == absl::ZeroDuration());
  CHECK(*ParseDuration("1.5s") == absl::Milliseconds(1500));
  for (const char* text : {"", "5", "0", "s", "-5s", "inf", "-inf", "5 s", "5d", "1h junk", "five seconds"}) {
    INFO(text);
    const absl::StatusOr<absl::Duration> duration = ParseDuration(text);
    REQUIRE_FALSE(duration.ok());
    CHECK(duration.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(ReasonOf(duration.status()) == "BAD_DURATION");
    CHECK(std::string(duration.status().message()).find(text) != std::string::npos);
  }
}

TEST_CASE("Bytes are shown in the largest unit that leaves a whole number before the point") {
  CHECK(FormatBytes(0) == "0 B");
  CHECK(FormatBytes(17) == "17 B");
  CHECK(FormatBytes(1023) == "1023 B");
  CHECK(FormatBytes(1024) == "1.0 KiB");
  CHECK(FormatBytes(640 * kMiB) == "640.0 MiB");
  CHECK(FormatBytes(12'047'383'265) == "11.22 GiB");
  CHECK(FormatBytes(kGiB) == "1.00 GiB");
  CHECK(FormatBytes(1536 * kGiB) == "1.50 TiB");
  CHECK(FormatBytes(18'446'744'073'709'551'615u) == "16.00 EiB");
}

TEST_CASE("Rounding up reaches the next unit rather than 1024 of the last") {
  CHECK(FormatBytes(kGiB - 1) == "1.00 GiB");
  CHECK(FormatBytes(kMiB - 1) == "1.0 MiB");
}

TEST_CASE("Aligning keeps what is aligned and rounds the rest up") {
  CHECK(AlignUp(0, 256) == 0);
  CHECK(AlignUp(1, 256) == 256);
  CHECK(AlignUp(256, 256) == 256);
  CHECK(AlignUp(257, 256) == 512);
  CHECK(AlignUp(5, 1) == 5);
}

}  // namespace
}  // namespace residency
