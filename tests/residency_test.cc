// SPDX-License-Identifier: Apache-2.0
#include "daemon/residency.h"

#include <array>
#include <catch2/catch.hpp>

namespace residency {
namespace {

TEST_CASE("Every pair of state and change leads where the design says, or nowhere") {
  using S = ModelState;
  // Rows: states; columns: changes, both in the order of their enumerations. '-' is "cannot happen", the rest are the
  // first letters of registering (r), Inactive, activating (g), Active (A), deactivating (d), Broken, Unloaded.
  const std::array<const char*, kModelStateCount> kTable = {
      "IUg-------U",  // registering
      "--g-------U",  // inactive
      "---AIr---B-",  // activating
      "------d--B-",  // active
      "-------IAB-",  // deactivating
      "----------U",  // broken
      "-----------",  // unloaded
  };
  for (int state = 0; state < kModelStateCount; ++state) {
    for (int change = 0; change < kModelChangeCount; ++change) {
      INFO("state " << ModelStateName(static_cast<S>(state)) << ", change " << change);
      const auto next = NextState(static_cast<S>(state), static_cast<ModelChange>(change));
      const char expected = kTable[state][change];
      if (expected == '-') {
        CHECK_FALSE(next.has_value());
        continue;
      }
      REQUIRE(next.has_value());
      const S wanted = expected == 'r'   ? S::kRegistering
                       : expected == 'I' ? S::kInactive
                       : expected == 'g' ? S::kActivating
                       : expected == 'A' ? S::kActive
                       : expected == 'd' ? S::kDeactivating
                       : expected == 'B' ? S::kBroken
                                         : S::kUnloaded;
      CHECK(*next == wanted);
    }
  }
}

}  // namespace
}  // namespace residency
