// SPDX-License-Identifier: Apache-2.0
#include "daemon/device_shares.h"

#include <catch2/catch.hpp>
#include <cstdint>

namespace residency {
namespace {

uint64_t Sum(const DeviceShares& shares) {
  return shares.free_bytes + shares.broker_bytes + shares.pool_idle_bytes + shares.contexts_bytes.value_or(0) +
         shares.others_bytes;
}

// A card of 1000: 300 under models, 100 in the pool, a context of 50, two clients with 70 together, 80 of a stranger.
MeasuredMemory Quiet() {
  return {.pool_idle_bytes = 100,
          .broker_bytes = 300,
          .free_bytes = 400,
          .total_bytes = 1000,
          .processes = MeasuredMemory::Processes{.daemon_bytes = 450, .clients_bytes = 70}};
}

TEST_CASE("Figures that fit together are shown as they are, and what they leave is the others'") {
  const DeviceShares shares = ShareOut(Quiet());
  CHECK(shares.free_bytes == 400);
  CHECK(shares.broker_bytes == 300);
  CHECK(shares.pool_idle_bytes == 100);
  CHECK(shares.contexts_bytes == 120);
  CHECK(shares.others_bytes == 80);
}

TEST_CASE("Where processes are not told apart contexts are absent, and among the others") {
  MeasuredMemory measured = Quiet();
  measured.processes.reset();
  const DeviceShares shares = ShareOut(measured);
  CHECK_FALSE(shares.contexts_bytes.has_value());
  CHECK(shares.others_bytes == 200);
  CHECK(Sum(shares) == 1000);
}

TEST_CASE("A cell that left the pool for a model between two figures is counted once") {
  MeasuredMemory measured = Quiet();
  measured.broker_bytes = 400;
  const DeviceShares shares = ShareOut(measured);
  CHECK(shares.broker_bytes == 400);
  CHECK(Sum(shares) == 1000);
  measured.free_bytes = 600;
  CHECK(ShareOut(measured).pool_idle_bytes == 0);
  CHECK(Sum(ShareOut(measured)) == 1000);
}

TEST_CASE("Whatever the figures are, the shares add up to the total and none is more than was measured") {
  const uint64_t figures[] = {0, 1, 99, 500, 999, 1000, 1001, UINT64_MAX / 4};
  for (uint64_t pool : figures) {
    for (uint64_t broker : figures) {
      for (uint64_t free : figures) {
        for (uint64_t daemon : figures) {
          for (uint64_t clients : figures) {
            const MeasuredMemory measured{pool, broker, free, 1000, MeasuredMemory::Processes{daemon, clients}};
            const DeviceShares shares = ShareOut(measured);
            const bool right = Sum(shares) == 1000 && shares.free_bytes <= free && shares.broker_bytes <= broker &&
                               shares.pool_idle_bytes <= pool && *shares.contexts_bytes <= daemon + clients;
            if (right) continue;
            INFO(pool << " " << broker << " " << free << " " << daemon << " " << clients);
            CHECK(right);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace residency
