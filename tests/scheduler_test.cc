// SPDX-License-Identifier: Apache-2.0
#include "daemon/scheduler.h"

#include <catch2/catch.hpp>
#include <random>

namespace residency {
namespace {

DeviceRoom Room(uint64_t total, uint64_t free, uint64_t broker, uint64_t reserve = 0) {
  return {.total_bytes = total,
          .free_bytes = free,
          .pool_idle_bytes = 0,
          .broker_bytes = broker,
          .budget_bytes = total,
          .reserve_bytes = reserve};
}

TEST_CASE("Available is what is free beyond the reserve, idle cells included, and within the budget") {
  DeviceRoom room = Room(100, 40, 30, 10);
  CHECK(room.available_bytes() == 30);
  CHECK(room.others_bytes() == 30);
  room.pool_idle_bytes = 5;
  CHECK(room.available_bytes() == 35);
  CHECK(room.others_bytes() == 25);
  room.budget_bytes = 50;
  CHECK(room.available_bytes() == 20);
  room.budget_bytes = 20;  // lowered below what is held
  CHECK(room.available_bytes() == 0);
  CHECK(Room(100, 5, 0, 10).available_bytes() == 0);
}

TEST_CASE("The least recently used idle models go, and no more of them than needed") {
  const absl::Time t = absl::UnixEpoch();
  const std::vector<Occupant> occupants = {{ModelId{1}, 30, false, t + absl::Seconds(3)},
                                           {ModelId{2}, 30, true, t},
                                           {ModelId{3}, 30, false, t + absl::Seconds(1)}};
  CHECK(DecideRoom(10, Room(100, 10, 90), occupants).victims.empty());
  CHECK(DecideRoom(40, Room(100, 10, 90), occupants).victims == std::vector<ModelId>{ModelId{3}});
  CHECK(DecideRoom(70, Room(100, 10, 90), occupants).victims == std::vector<ModelId>{ModelId{3}, ModelId{1}});
  const RoomDecision blocked = DecideRoom(100, Room(100, 10, 90), occupants);
  CHECK_FALSE(blocked.fits);
  CHECK(blocked.victims.empty());
  CHECK(blocked.in_the_way == std::vector<ModelId>{ModelId{2}});
  CHECK(blocked.available_bytes == 70);
  const RoomDecision hopeless = DecideRoom(101, Room(100, 10, 90), occupants);
  CHECK_FALSE(hopeless.fits);
  CHECK(hopeless.in_the_way.empty());
}

TEST_CASE("What is promised to phases is room for nobody else, and goes with the claim") {
  DeviceRoom room = Room(100, 60, 20);
  room.promised_bytes = 50;
  CHECK(room.available_bytes() == 10);
  const std::vector<Occupant> occupants = {{ModelId{1}, 20, false, absl::UnixEpoch(), 50}};
  CHECK(DecideRoom(10, room, occupants).victims.empty());
  CHECK(DecideRoom(80, room, occupants).victims == std::vector<ModelId>{ModelId{1}});
  CHECK(DecideRoom(81, room, occupants).available_bytes == 80);
}

TEST_CASE("A decision never counts a model in use as room, and what it frees is enough") {
  const uint32_t seed = 20261130;
  std::mt19937_64 random(seed);
  INFO("seed " << seed);
  for (int round = 0; round < 20000; ++round) {
    std::vector<Occupant> occupants;
    uint64_t held = 0;
    for (uint64_t id = 1; id <= random() % 6; ++id) {
      const uint64_t bytes = 1 + random() % 50;
      occupants.push_back({ModelId{id}, bytes, random() % 3 == 0, absl::UnixEpoch() + absl::Seconds(random() % 4)});
      held += bytes;
    }
    const uint64_t free = random() % 60;
    const uint64_t needed = 1 + random() % 150;
    const RoomDecision decision = DecideRoom(needed, Room(held + free + random() % 20, free, held), occupants);
    uint64_t idle = 0;
    uint64_t going = 0;
    for (const Occupant& occupant : occupants) {
      const bool victim =
          std::find(decision.victims.begin(), decision.victims.end(), occupant.model) != decision.victims.end();
      if (!occupant.in_use) idle += occupant.device_bytes;
      if (victim) {
        REQUIRE_FALSE(occupant.in_use);
        going += occupant.device_bytes;
      }
    }
    REQUIRE(decision.fits == (free + idle >= needed));
    if (decision.fits) REQUIRE(free + going >= needed);
    if (!decision.fits) REQUIRE(decision.victims.empty());
  }
}

}  // namespace
}  // namespace residency
