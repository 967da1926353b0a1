// SPDX-License-Identifier: Apache-2.0
//
// What a client process finds on the device, for the end-to-end tests.
#ifndef RESIDENCY_TESTS_READ_BACK_H_
#define RESIDENCY_TESTS_READ_BACK_H_

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "tests/daemon_rig.h"
#include "tests/test_checkpoints.h"

namespace residency {

// What `attach --sha256` prints: `SHA256  TENSOR` lines, each tensor once.
inline Hashes ReadBack(DaemonRig& rig, const std::string& model) {
  const Outcome outcome = rig.Ctl({"attach", model, "--sha256"});
  INFO(outcome.errors);
  REQUIRE(outcome.exit_status == 0);
  Hashes hashes;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(outcome.output, '\n', absl::SkipEmpty()))) {
    const size_t digest_length = 64;
    REQUIRE(line.size() > digest_length + 2);
    REQUIRE(line.substr(digest_length, 2) == "  ");
    const bool is_new = hashes.emplace(line.substr(digest_length + 2), line.substr(0, digest_length)).second;
    REQUIRE(is_new);
  }
  return hashes;
}

}  // namespace residency

#endif  // RESIDENCY_TESTS_READ_BACK_H_
