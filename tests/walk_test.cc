// SPDX-License-Identifier: Apache-2.0
//
// The random walk. Without arguments: the seeds of every ordinary run. With them:
//   walk_test --seed N --steps M   one walk again, as a failing one prints it
//   walk_test --long [--minutes M]   new seeds for M minutes, 30 unless said
#define CATCH_CONFIG_RUNNER
#include "tests/walk.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <iostream>

namespace residency {
namespace {

constexpr uint64_t kSeeds = 60;
constexpr uint64_t kStepsPerSeed = 2000;
constexpr uint64_t kLongSteps = 20000;

uint64_t only_seed = 0;
uint64_t only_steps = kStepsPerSeed;
bool run_long = false;
int long_minutes = 30;

std::ostream& operator<<(std::ostream& out, const WalkCounts& counts) {
  return out << counts.steps << " steps: " << counts.events << " events, " << counts.answers << " answers, "
             << counts.realized << " plans realized, " << counts.mapped << " times mapped, " << counts.uses << " uses, "
             << counts.deaths << " deaths, " << counts.faults << " faults hit, " << counts.broken
             << " broken at the end, " << counts.phases << " phases asked for, " << counts.early_cells
             << " cells mapped while others were filled, " << counts.hindered << " swaps hindered, " << counts.early
             << " fills while reading, " << counts.readings_failed << " of them with a reading that failed";
}

// False where something did not hold.
bool Take(uint64_t seed, uint64_t steps, WalkCounts& sum) {
  Walk walk(seed);
  const std::string wrong = walk.Run(steps);
  sum += walk.counts();
  if (wrong.empty()) return true;
  std::cout << "seed " << seed << ", step " << walk.taken() << ": " << wrong << "\n  again: walk_test --seed " << seed
            << " --steps " << steps << std::endl;
  return false;
}

TEST_CASE("Whatever happens in whatever order, nothing is lent twice, lost, wrong or left unanswered") {
  WalkCounts sum;
  uint64_t failed = 0;
  uint64_t walks = 0;
  if (only_seed != 0) {
    failed += Take(only_seed, only_steps, sum) ? 0 : 1;
    ++walks;
  } else if (run_long) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(long_minutes);
    // Seeds that no ordinary run has.
    for (uint64_t seed = 1000000; std::chrono::steady_clock::now() < end; ++seed, ++walks) {
      failed += Take(seed, kLongSteps, sum) ? 0 : 1;
      if (walks % 10 == 9) std::cout << walks + 1 << " walks, " << failed << " failed, " << sum << std::endl;
    }
  } else {
    for (uint64_t seed = 1; seed <= kSeeds; ++seed, ++walks) failed += Take(seed, kStepsPerSeed, sum) ? 0 : 1;
    // It does what it is for.
    CHECK(sum.steps >= 100000);
    CHECK(sum.realized > 2000);
    CHECK(sum.mapped > 1000);
    CHECK(sum.uses > 1000);
    CHECK(sum.deaths > 50);
    CHECK(sum.faults > 500);
    CHECK(sum.phases > 1000);
    CHECK(sum.early_cells > 500);
    CHECK(sum.hindered > 5);
    CHECK(sum.early > 50);
    CHECK(sum.readings_failed > 10);
  }
  std::cout << walks << " walks, " << failed << " failed, " << sum << std::endl;
  CHECK(failed == 0);
}

}  // namespace
}  // namespace residency

int main(int argc, char** argv) {
  Catch::Session session;
  using Catch::clara::Opt;
  session.cli(session.cli() | Opt(residency::only_seed, "N")["--seed"]("one walk with this seed") |
              Opt(residency::only_steps, "N")["--steps"]("of that walk") |
              Opt(residency::run_long)["--long"]("new seeds, for a time") |
              Opt(residency::long_minutes, "N")["--minutes"]("how long that is"));
  if (const int status = session.applyCommandLine(argc, argv); status != 0) return status;
  return session.run();
}
