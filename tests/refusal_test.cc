// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/refusal.h"

#include <catch2/catch.hpp>
#include <cerrno>
#include <string>

#include "absl/strings/cord.h"

namespace residency {
namespace {

Refusal FullRefusal() {
  Refusal refusal;
  refusal.reason = "GPU_BUDGET";
  refusal.needed_bytes = 15'731'728'384;
  refusal.available_bytes = 0;
  refusal.file = "/models/a b.safetensors";
  refusal.tensor = std::string("gew\xC3\xB6hnlich\0end", 16);
  refusal.holders.push_back({4711, 1000, "trainer", 17, 1 << 20, 2.5});
  refusal.holders.push_back({-1, 4'294'967'295u, "", 0, 18'446'744'073'709'551'615u, -0.0});
  return refusal;
}

TEST_CASE("A refusal comes out of a status as it went in") {
  const absl::Status status = Refuse(absl::StatusCode::kResourceExhausted, FullRefusal(), "no room");
  CHECK(status.code() == absl::StatusCode::kResourceExhausted);
  CHECK(status.message() == "no room");
  const absl::Status copy = status;
  REQUIRE(GetRefusal(copy).has_value());
  CHECK(*GetRefusal(copy) == FullRefusal());
  CHECK(ReasonOf(copy) == "GPU_BUDGET");
}

TEST_CASE("A figure that is 0 is told from one that is not given") {
  Refusal refusal;
  refusal.reason = "IN_USE";
  refusal.available_bytes = 0;
  const absl::Status status = Refuse(absl::StatusCode::kFailedPrecondition, refusal, "");
  REQUIRE(GetRefusal(status).has_value());
  CHECK_FALSE(GetRefusal(status)->needed_bytes.has_value());
  CHECK(GetRefusal(status)->available_bytes == 0);
}

TEST_CASE("The short form has a reason and nothing else") {
  const absl::Status status = Refuse(absl::StatusCode::kInvalidArgument, "BAD_SIZE", "what is that");
  Refusal expected;
  expected.reason = "BAD_SIZE";
  REQUIRE(GetRefusal(status).has_value());
  CHECK(*GetRefusal(status) == expected);
}

TEST_CASE("A status without a refusal has neither refusal nor reason") {
  absl::Status plain = absl::InternalError("x");
  plain.SetPayload("type.elsewhere/Thing", absl::Cord("payload"));
  CHECK_FALSE(GetRefusal(plain).has_value());
  CHECK(ReasonOf(plain).empty());
  CHECK_FALSE(GetRefusal(absl::OkStatus()).has_value());
}

TEST_CASE("A payload that was cut or lengthened at any byte is no refusal") {
  const absl::Status status = Refuse(absl::StatusCode::kInternal, FullRefusal(), "");
  std::string url;
  std::string bytes;
  status.ForEachPayload([&](absl::string_view key, const absl::Cord& payload) {
    url = std::string(key);
    bytes = std::string(payload);
  });
  for (size_t length = 0; length < bytes.size(); ++length) {
    absl::Status cut = absl::InternalError("");
    cut.SetPayload(url, absl::Cord(bytes.substr(0, length)));
    INFO("cut to " << length << " of " << bytes.size());
    CHECK_FALSE(GetRefusal(cut).has_value());
  }
  absl::Status longer = absl::InternalError("");
  longer.SetPayload(url, absl::Cord(bytes + "x"));
  CHECK_FALSE(GetRefusal(longer).has_value());
}

TEST_CASE("An errno becomes the status code that a caller can act on") {
  CHECK(ErrnoStatus(ENOENT, "open /x").code() == absl::StatusCode::kNotFound);
  CHECK(ErrnoStatus(EACCES, "open /x").code() == absl::StatusCode::kPermissionDenied);
  CHECK(ErrnoStatus(EPERM, "open /x").code() == absl::StatusCode::kPermissionDenied);
  for (const int error : {ENOMEM, ENOSPC, EMFILE, ENFILE}) {
    CHECK(ErrnoStatus(error, "x").code() == absl::StatusCode::kResourceExhausted);
  }
  CHECK(ErrnoStatus(EIO, "x").code() == absl::StatusCode::kInternal);
  CHECK(ErrnoStatus(ENOENT, "open /x").message() == "open /x: No such file or directory");
}

}  // namespace
}  // namespace residency
