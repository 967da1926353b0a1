// SPDX-License-Identifier: Apache-2.0
//
// The core on callers that go away, or whose deadline passes, while their model is being filled.
#include <catch2/catch.hpp>

#include "mechanisms/refusal.h"
#include "tests/arbiter_rig.h"

namespace residency {
namespace {

constexpr uint64_t kSize = 8 * kMiB;

// What a device answers that was stopped in time: everything is as before.
PlanRealized Stopped(ModelId model) {
  return {.model = model, .status = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "stopped")};
}

TEST_CASE("A fill that nobody waits for any more is stopped, and the model is inactive without an error") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const RequestId request = rig.Activate("a", rig.Open(1), rig.now() + absl::Seconds(1));
  const TimerId deadline = rig.Take<SetTimer>().at(0).timer;
  rig.Measured();
  CHECK_FALSE(rig.Has<CancelRealize>());
  SECTION("its caller went away") {
    rig.Feed(RequestCancelled{request});
    CHECK(ReasonOf(rig.OnlyReply().status) == "CANCELLED");
  }
  SECTION("its deadline passed") {
    rig.Feed(TimerFired{deadline});
    CHECK(ReasonOf(rig.OnlyReply().status) == "DEADLINE");
  }
  const auto stopped = rig.Take<CancelRealize>();
  REQUIRE(stopped.size() == 1);
  CHECK(stopped[0].model == a);
  // It is stopping, not stopped: the state says so until the device does.
  CHECK(rig.model(a).state == ModelState::kActivating);
  rig.Feed(Stopped(a));
  CHECK(rig.model(a).state == ModelState::kInactive);
  CHECK(rig.model(a).claimed_device_bytes == 0);
  CHECK(rig.model(a).last_error.ok());
  CHECK_FALSE(rig.Has<Reply>());
  const LeaseId lease = rig.Take<GrantLease>().at(0).lease;
  rig.Feed(LeaseReleased{lease, rig.Take<RevokeLease>().at(0).generation});
  CHECK(rig.arbiter().records().leases.empty());
  CHECK_FALSE(rig.arbiter().oldest_transition().has_value());
}

TEST_CASE("Of two callers that wait for one fill, one that leaves does not stop it for the other") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const RequestId first = rig.Activate("a", rig.Open(1));
  const RequestId second = rig.Activate("a", rig.Open(2));
  rig.Measured();
  const RequestId leaves = GENERATE(true, false) ? first : second;
  rig.Feed(RequestCancelled{leaves});
  CHECK(rig.OnlyReply().request == leaves);
  CHECK_FALSE(rig.Has<CancelRealize>());
  SECTION("the other one stays and gets its lease") {
    rig.Realized(a);
    const Reply reply = rig.OnlyReply();
    CHECK(reply.request == (leaves == first ? second : first));
    CHECK(reply.status.ok());
    // The other one's may have been made before it left.
    std::vector<GrantLease> granted = rig.Take<GrantLease>();
    CHECK(granted.size() == (leaves == first ? 2 : 1));
    CHECK(granted.back().session == SessionId{leaves == first ? uint64_t{2} : uint64_t{1}});
    CHECK(rig.Take<SendCells>().at(0).lease == granted.back().lease);
    // That of the one fill.
    CHECK(rig.Take<MeasureDevice>().size() == 1);
    CHECK(rig.model(a).state == ModelState::kActive);
  }
  SECTION("the other one leaves too") {
    rig.Feed(RequestCancelled{leaves == first ? second : first});
    CHECK(rig.Take<CancelRealize>().size() == 1);
    CHECK(rig.Take<Reply>().size() == 1);
    rig.Feed(Stopped(a));
    CHECK(rig.model(a).state == ModelState::kInactive);
  }
}

TEST_CASE("Whoever waits for another model does not keep a fill going, nor is held up by it") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const ModelId b = rig.Register("b", kSize);
  const RequestId request = rig.Activate("a");
  rig.Measured();
  rig.Activate("b");
  rig.Deactivate("a");
  rig.Feed(RequestCancelled{request});
  CHECK(rig.Take<CancelRealize>().size() == 1);
  rig.effects.clear();
  rig.Feed(Stopped(a));
  REQUIRE(rig.Take<MeasureDevice>().size() == 1);
  rig.Measured();
  rig.Realized(b);
  // b's activation, and the deactivation of what is inactive.
  CHECK(rig.Take<Reply>().size() == 2);
  CHECK(rig.model(b).state == ModelState::kActive);
}

TEST_CASE("Whoever asks for a model whose fill is being stopped gets it all the same") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const RequestId request = rig.Activate("a");
  rig.Measured();
  rig.Feed(RequestCancelled{request});
  rig.effects.erase(rig.effects.begin(), rig.effects.end() - 1);
  CHECK(rig.Has<CancelRealize>());
  rig.effects.clear();
  rig.Activate("a", rig.Open(2));
  SECTION("by a new fill, where it was stopped in time") {
    // What the fill before left is no RealizePlan of this one.
    rig.Feed(Stopped(a));
    REQUIRE(rig.Take<MeasureDevice>().size() == 1);
    rig.Measured();
    rig.Realized(a);
  }
  SECTION("by the old one, where that was through already") {
    rig.Feed(PlanRealized{.model = a, .device_bytes = kSize, .copied_bytes = kSize});
    CHECK_FALSE(rig.Has<MeasureDevice>());
  }
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.Take<GrantLease>().size() == 1);
  CHECK(rig.model(a).state == ModelState::kActive);
}

TEST_CASE("A fill that was told to stop and could not be undone leaves the model broken, with the reason") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const RequestId request = rig.Activate("a");
  rig.Measured();
  rig.Feed(RequestCancelled{request});
  PlanRealized broken = Stopped(a);
  broken.broken = true;
  rig.Feed(broken);
  CHECK(rig.model(a).state == ModelState::kBroken);
  CHECK_FALSE(rig.model(a).last_error.ok());
}

}  // namespace
}  // namespace residency
