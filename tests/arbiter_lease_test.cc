// SPDX-License-Identifier: Apache-2.0
//
// The core on sessions and leases: granted, revoked, released, and lost with their process.
#include <algorithm>
#include <catch2/catch.hpp>

#include "mechanisms/refusal.h"
#include "tests/arbiter_rig.h"

namespace residency {
namespace {

constexpr uint64_t kSize = 8 * kMiB;

TEST_CASE("A lease whose client is still mapping counts as in use") {
  ArbiterRig rig(kSize + 2 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Register("b", kSize);
  rig.BringOn("a", a, rig.Open(1));
  rig.effects.clear();
  rig.Activate("b");
  rig.Measured();
  CHECK(ReasonOf(rig.OnlyReply().status) == "IN_USE");
}

TEST_CASE("A client that took its pages as the time ran out gets them back when it says so") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();
  rig.Deactivate("a", absl::Seconds(1));
  const TimerId timer = rig.Take<SetTimer>().back().timer;
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(TimerFired{timer});
  rig.Feed(UseWordsReopened{a, {lease}});
  CHECK(ReasonOf(rig.OnlyReply().status) == "IN_USE");
  CHECK_FALSE(rig.Has<SendCells>());
  rig.Feed(LeaseReleased{lease, 1});
  CHECK(rig.Take<SendCells>().size() == 1);
}

TEST_CASE("A lease survives deactivation and gets the next generation without asking") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId lease = rig.Mapped();
  rig.Deactivate("a");
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(LeaseReleased{lease, 1});
  rig.Realized(a);
  CHECK(rig.arbiter().records().leases.at(lease).state == LeaseState::kRevoked);
  rig.effects.clear();
  rig.BringOn("a", a);
  const auto sent = rig.Take<SendCells>();
  REQUIRE(sent.size() == 1);
  CHECK(sent[0].lease == lease);
  CHECK(sent[0].generation == 2);
}

// "a" is inactive, and session 1 has a lease on it from before.
struct LapsedRig : ArbiterRig {
  LapsedRig() : ArbiterRig(64 * kMiB), a(Register("a", kSize)) {
    BringOn("a", a, Open(1));
    lease = Mapped();
    Deactivate("a");
    Feed(UseWordsClosed{a, {}});
    Feed(LeaseReleased{lease, 1});
    Realized(a);
    effects.clear();
  }
  const ModelId a;
  LeaseId lease;
};

TEST_CASE("Clients are sent cells while they are filled, and may use none before all are filled and verified") {
  LapsedRig rig;
  const ModelId a = rig.a;
  const LeaseId lease = rig.lease;
  rig.Activate("a", rig.Open(2));
  rig.Measured();
  const LeaseId other = rig.Take<GrantLease>().at(0).lease;
  for (const Effect& effect : rig.effects) {
    const auto* plan = std::get_if<RealizePlan>(&effect);
    if (plan == nullptr) continue;
    REQUIRE(plan->readers.size() == 2);
    CHECK(plan->readers[0].lease == lease);
    CHECK(plan->readers[1].lease == other);
    CHECK(plan->readers[0].generation == 2);
    CHECK(plan->readers[1].generation == 2);
  }
  CHECK_FALSE(rig.Has<SendCells>());
  CHECK(rig.arbiter().records().leases.at(lease).holds_cells());
  CHECK(rig.arbiter().records().leases.at(other).holds_cells());
  // It has not mapped what the last packet brings, whatever it says.
  rig.Feed(LeaseMapped{lease, 2});
  CHECK(rig.arbiter().records().leases.at(lease).state == LeaseState::kFilling);
  rig.Realized(a);
  const auto sent = rig.Take<SendCells>();
  REQUIRE(sent.size() == 2);
  CHECK(sent[0].generation == 2);
  CHECK(sent[1].generation == 2);
  rig.Feed(LeaseMapped{lease, 2});
  CHECK(rig.arbiter().records().leases.at(lease).state == LeaseState::kLive);
}

TEST_CASE("A filling that fails takes back what clients were sent of it, and a lease that was made for it ends") {
  LapsedRig rig;
  const ModelId a = rig.a;
  const LeaseId lease = rig.lease;
  rig.Activate("a", rig.Open(2));
  rig.Measured();
  const LeaseId other = rig.Take<GrantLease>().at(0).lease;
  rig.Take<RealizePlan>();
  rig.Feed(PlanRealized{.model = a, .status = Refuse(absl::StatusCode::kDataLoss, "VERIFY", "wrong bytes")});
  CHECK(ReasonOf(rig.OnlyReply().status) == "VERIFY");
  CHECK(rig.Take<RevokeLease>().size() == 2);
  rig.Feed(LeaseReleased{other, 2});
  CHECK(rig.Take<EndLease>().at(0).lease == other);
  CHECK_FALSE(rig.arbiter().records().leases.contains(other));
  // The older one gets its cells with the next activation, at once or as soon as it has let go of what it was sent.
  const bool at_once = GENERATE(true, false);
  if (at_once) rig.Feed(LeaseReleased{lease, 2});
  rig.BringOn("a", a);
  CHECK(rig.Take<SendCells>().size() == (at_once ? 1 : 0));
  if (!at_once) {
    rig.Feed(LeaseReleased{lease, 2});
    CHECK(rig.Take<SendCells>().size() == 1);
  }
  CHECK(rig.arbiter().records().leases.at(lease).generation > 2);
}

// "a" could not be filled, and the client of the one lease has cells of it.
struct FailedFill : LapsedRig {
  FailedFill() {
    Activate("a");
    Measured();
    Take<RealizePlan>();
    Feed(PlanRealized{.model = a, .status = Refuse(absl::StatusCode::kDataLoss, "VERIFY", "wrong bytes")});
    effects.clear();
  }
};

TEST_CASE("An unload waits for a client that was sent cells of a filling that failed") {
  FailedFill rig;
  const RequestId unload = rig.NextRequest();
  rig.Feed(UnloadRequested{unload, "a"});
  rig.Feed(UseWordsClosed{rig.a, {}});
  CHECK_FALSE(rig.Has<EndLease>());
  CHECK_FALSE(rig.Has<DropModel>());
  rig.Feed(LeaseReleased{rig.lease, 2});
  rig.Realized(rig.a);
  CHECK(rig.Take<EndLease>().at(0).lease == rig.lease);
  CHECK(rig.Take<DropModel>().size() == 1);
  rig.Feed(ModelDropped{rig.a, kSize, 0});
  CHECK(rig.OnlyReply().request == unload);
}

TEST_CASE(
    "A lease whose last cells cannot be handed over ends, with the reason, once its client has let the others go") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId lease = rig.Take<GrantLease>().at(0).lease;
  rig.Feed(LeaseFailed{lease, Refuse(absl::StatusCode::kResourceExhausted, "DESCRIPTOR_LIMIT", "too many")});
  CHECK(rig.Take<RevokeLease>().at(0).lease == lease);
  CHECK_FALSE(rig.Has<EndLease>());
  rig.Feed(LeaseReleased{lease, 1});
  const EndLease ended = rig.Take<EndLease>().at(0);
  CHECK(ended.reason == "DESCRIPTOR_LIMIT");
  CHECK(ended.message == "too many");
}

TEST_CASE("An activation whose own client cannot map is refused with its reason, and stops unless others wait") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Activate("a", rig.Open(1));
  rig.Measured();
  const LeaseId lease = rig.Take<GrantLease>().at(0).lease;
  rig.Feed(LeaseFailed{lease, Refuse(absl::StatusCode::kAborted, "GPU_MEMORY", "no room for a context"), true});
  CHECK(ReasonOf(rig.OnlyReply().status) == "GPU_MEMORY");
  CHECK(rig.Take<CancelRealize>().size() == 1);
  CHECK(rig.Take<EndLease>().size() == 1);
  CHECK_FALSE(rig.Has<GrantLease>());
}

TEST_CASE("A lease that is released while its cells are filled goes at once") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const SessionId session = rig.Open(1);
  rig.Activate("a", session);
  rig.Activate("a", rig.Open(2));
  rig.Measured();
  const LeaseId lease = rig.Take<GrantLease>().at(0).lease;
  const RequestId release = rig.NextRequest();
  rig.Feed(ReleaseLeaseRequested{release, session, lease});
  CHECK(rig.Take<RevokeLease>().at(0).lease == lease);
  rig.Feed(LeaseReleased{lease, 1});
  CHECK(rig.OnlyReply().request == release);
  CHECK(rig.Take<EndLease>().at(0).lease == lease);
  // The filling goes on, and its caller is given a lease all the same.
  rig.Realized(a);
  CHECK(rig.Take<GrantLease>().size() == 2);
  CHECK(rig.Take<SendCells>().size() == 2);
}

TEST_CASE("Each activation begins a generation, whether or not anybody holds a lease") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  for (uint64_t generation = 1; generation <= 3; ++generation) {
    rig.BringOn("a", a);
    CHECK(std::get<ActivateOutcome>(rig.OnlyReply().outcome).generation == generation);
    rig.Deactivate("a");
    rig.Realized(a);
    rig.effects.clear();
  }
}

TEST_CASE("A process that dies frees its leases, and a deactivation that waited for it goes on") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const SessionId session = rig.Open(1);
  rig.BringOn("a", a, session);
  rig.Mapped();
  rig.effects.clear();
  rig.Deactivate("a", absl::Seconds(60));
  rig.Feed(UseWordsClosed{a, {}});
  CHECK_FALSE(rig.Has<RealizePlan>());
  rig.Feed(SessionEnded{session});
  rig.Realized(a);
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.arbiter().records().leases.empty());
  CHECK(rig.arbiter().records().sessions.empty());
}

TEST_CASE("A process that hung up keeps what it may have mapped until it is gone") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const SessionId session = rig.Open(1);
  rig.BringOn("a", a, session);
  rig.Mapped();
  rig.effects.clear();
  rig.Feed(SessionHungUp{session});
  rig.Deactivate("a");
  CHECK(ReasonOf(rig.OnlyReply().status) == "IN_USE");
  rig.Feed(SessionEnded{session});
  rig.Deactivate("a");
  rig.Realized(a);
  CHECK(rig.OnlyReply().status.ok());
}

TEST_CASE("Whoever gave up while the model came on gets no lease") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const RequestId request = rig.Activate("a", rig.Open(1));
  rig.Measured();
  const LeaseId lease = rig.Take<GrantLease>().at(0).lease;
  rig.Feed(RequestCancelled{request});
  rig.Take<Reply>();
  CHECK(rig.Take<RevokeLease>().at(0).lease == lease);
  // Too late to be stopped.
  rig.Realized(a);
  CHECK_FALSE(rig.Has<GrantLease>());
  CHECK_FALSE(rig.Has<SendCells>());
  CHECK_FALSE(rig.Has<Reply>());
  CHECK(rig.model(a).state == ModelState::kActive);
  rig.Feed(LeaseReleased{lease, 1});
  CHECK(rig.Take<EndLease>().at(0).lease == lease);
  CHECK(rig.arbiter().records().leases.empty());
}

TEST_CASE("Unloading an active model takes it off, ends its leases and frees the name") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();
  rig.Feed(UnloadRequested{RequestId{200}, "a"});
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(LeaseReleased{lease, 1});
  rig.Realized(a);
  CHECK(rig.Take<EndLease>().at(0).reason == "UNLOADED");
  CHECK(rig.Take<DropModel>().size() == 1);
  rig.Feed(ModelDropped{a, kSize, 0});
  const Reply reply = rig.OnlyReply();
  REQUIRE(reply.status.ok());
  CHECK(std::get<UnloadOutcome>(reply.outcome).device_bytes == kSize);
  CHECK(rig.arbiter().records().models.empty());
  CHECK(rig.arbiter().records().leases.empty());
}

TEST_CASE("A lease is released by its own session and by no other, once its client has let go") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const SessionId one = rig.Open(1);
  const SessionId two = rig.Open(2);
  rig.BringOn("a", a, one);
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();
  rig.Feed(ReleaseLeaseRequested{RequestId{50}, two, lease});
  CHECK(ReasonOf(rig.OnlyReply().status) == "SESSION_OWNER");
  rig.Feed(ReleaseLeaseRequested{RequestId{51}, one, lease});
  CHECK(rig.Take<CloseAndRevoke>().size() == 1);
  CHECK_FALSE(rig.Has<Reply>());
  rig.Feed(LeaseReleased{lease, 1});
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.Take<EndLease>().size() == 1);
  CHECK_FALSE(rig.Has<SendCells>());
  rig.Feed(ReleaseLeaseRequested{RequestId{52}, one, lease});
  CHECK(rig.OnlyReply().status.ok());
}

TEST_CASE("A lease that is released while its cells are on their way ends when they have arrived") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const SessionId one = rig.Open(1);
  rig.BringOn("a", a, one);
  const LeaseId lease = rig.Take<GrantLease>().at(0).lease;
  rig.effects.clear();
  rig.Feed(ReleaseLeaseRequested{RequestId{50}, one, lease});
  CHECK_FALSE(rig.Has<CloseAndRevoke>());
  rig.Feed(LeaseMapped{lease, 1});
  CHECK(rig.Take<CloseAndRevoke>().size() == 1);
  rig.Feed(LeaseReleased{lease, 1});
  CHECK(rig.OnlyReply().status.ok());
}

TEST_CASE("A deactivation waits for a client that is leaving, and does not call it a user") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const SessionId one = rig.Open(1);
  rig.BringOn("a", a, one);
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();
  rig.Feed(ReleaseLeaseRequested{RequestId{50}, one, lease});
  rig.Deactivate("a");
  rig.Feed(UseWordsClosed{a, {}});
  CHECK_FALSE(rig.Has<RealizePlan>());
  rig.Feed(LeaseReleased{lease, 1});
  rig.Realized(a);
  const auto replies = rig.Take<Reply>();
  REQUIRE(replies.size() == 2);
  CHECK(replies[0].status.ok());
  CHECK(replies[1].status.ok());
}

TEST_CASE("A release that met a revocation which is taken back is carried out after it") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const SessionId one = rig.Open(1);
  rig.BringOn("a", a, one);
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();
  rig.Deactivate("a", absl::Seconds(1));
  const TimerId timer = rig.Take<SetTimer>().back().timer;
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(ReleaseLeaseRequested{RequestId{50}, one, lease});
  rig.Feed(TimerFired{timer});
  rig.Feed(UseWordsReopened{a, {}});
  CHECK(ReasonOf(rig.OnlyReply().status) == "IN_USE");
  CHECK(rig.Take<CloseAndRevoke>().size() == 1);
  rig.Feed(LeaseReleased{lease, 1});
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.arbiter().records().leases.empty());
}

TEST_CASE("A broken model is unloaded only once its clients have let go") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId lease = rig.Mapped();
  rig.Feed(VerifyRequested{rig.NextRequest(), "a"});
  rig.Feed(CellsVerified{.model = a, .status = absl::DataLossError("wrong"), .broken = true});
  CHECK(rig.model(a).state == ModelState::kBroken);
  rig.effects.clear();
  rig.Feed(UnloadRequested{rig.NextRequest(), "a"});
  CHECK_FALSE(rig.Has<DropModel>());
  SECTION("one that is in use stays") {
    rig.Feed(UseWordsClosed{a, {lease}});
    rig.Feed(UseWordsReopened{a, {}});
    CHECK(ReasonOf(rig.OnlyReply().status) == "IN_USE");
    CHECK(rig.model(a).state == ModelState::kBroken);
  }
  SECTION("one that is idle goes") {
    rig.Feed(UseWordsClosed{a, {}});
    rig.Feed(LeaseReleased{lease, 1});
    rig.Realized(a);
    CHECK(rig.Take<DropModel>().size() == 1);
    rig.Feed(ModelDropped{a, kSize, 0});
    CHECK(rig.OnlyReply().status.ok());
  }
}

TEST_CASE("An unload that cannot take everything off the GPU is refused, and the model is not forgotten") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a);
  rig.effects.clear();
  rig.Feed(UnloadRequested{rig.NextRequest(), "a"});
  SECTION("it stays active where that was undone") {
    rig.Feed(PlanRealized{.model = a, .status = absl::InternalError("cuMemUnmap"), .device_bytes = kSize});
    CHECK(rig.model(a).state == ModelState::kActive);
  }
  SECTION("it is broken where that could not be undone, and can be unloaded again") {
    rig.Feed(
        PlanRealized{.model = a, .status = absl::InternalError("cuMemUnmap"), .broken = true, .device_bytes = kSize});
    CHECK(rig.model(a).state == ModelState::kBroken);
  }
  CHECK(rig.OnlyReply().status.message() == "cuMemUnmap");
  CHECK_FALSE(rig.Has<DropModel>());
  rig.effects.clear();
  rig.Feed(UnloadRequested{rig.NextRequest(), "a"});
  rig.Realized(a);
  CHECK(rig.Take<DropModel>().size() == 1);
  rig.Feed(ModelDropped{a, kSize, 0});
  CHECK(rig.OnlyReply().status.ok());
}

TEST_CASE("A drain that its caller gives up leaves the leases alone again, and the device is free for others") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();
  const RequestId request = rig.Deactivate("a", absl::Hours(1));
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(RequestCancelled{request});
  CHECK(rig.OnlyReply().status.code() == absl::StatusCode::kCancelled);
  CHECK(rig.Take<ReopenUseWords>().at(0).leases == std::vector<LeaseId>{lease});
  rig.Feed(UseWordsReopened{a, {}});
  CHECK(rig.model(a).state == ModelState::kActive);
  CHECK_FALSE(rig.arbiter().oldest_transition().has_value());
  CHECK_FALSE(rig.Has<Reply>());
}

TEST_CASE("A session that hangs up loses the leases that hold nothing, at once") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const SessionId session = rig.Open(1);
  rig.BringOn("a", a, session);
  const LeaseId lease = rig.Mapped();
  rig.Deactivate("a");
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(LeaseReleased{lease, 1});
  rig.Realized(a);
  rig.effects.clear();
  rig.Feed(SessionHungUp{session});
  CHECK(rig.Take<EndLease>().size() == 1);
  CHECK(rig.arbiter().records().leases.empty());
  rig.BringOn("a", a);
  rig.effects.clear();
  rig.Deactivate("a");
  rig.Realized(a);
  CHECK(rig.OnlyReply().status.ok());
}

TEST_CASE("A deactivation waits for a client that is just mapping, and finds out then whether it uses the model") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId quick = rig.Mapped();
  rig.effects.clear();
  rig.Activate("a", rig.Open(2));
  const LeaseId slow = rig.Take<GrantLease>().at(0).lease;
  rig.effects.clear();
  rig.Deactivate("a");
  CHECK(rig.Take<CloseUseWords>().at(0).leases == std::vector<LeaseId>{quick});
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(LeaseReleased{quick, 1});
  CHECK_FALSE(rig.Has<RealizePlan>());
  rig.Feed(LeaseMapped{slow, 1});
  CHECK(rig.Take<CloseUseWords>().at(0).leases == std::vector<LeaseId>{slow});
  SECTION("it does not") {
    rig.Feed(UseWordsClosed{a, {}});
    rig.Feed(LeaseReleased{slow, 1});
    rig.Realized(a);
    CHECK(rig.OnlyReply().status.ok());
  }
  SECTION("it does, so the first one gets its cells back") {
    rig.Feed(UseWordsClosed{a, {slow}});
    CHECK(ReasonOf(rig.OnlyReply().status) == "IN_USE");
    rig.Feed(UseWordsReopened{a, {}});
    CHECK(rig.Take<SendCells>().at(0).lease == quick);
    CHECK(rig.model(a).state == ModelState::kActive);
  }
}

TEST_CASE("An activation that is given up while it makes room leaves the victim where it is") {
  ArbiterRig rig(kSize + 2 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Register("b", kSize);
  rig.BringOn("a", a, rig.Open(1));
  rig.Mapped();
  rig.effects.clear();
  const RequestId request = rig.Activate("b");
  rig.Measured();
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(RequestCancelled{request});
  CHECK(rig.Take<ReopenUseWords>().size() == 1);
  rig.Feed(UseWordsReopened{a, {}});
  CHECK(rig.model(a).state == ModelState::kActive);
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.Take<Reply>().size() == 1);
}

// Two models with a lease each fill the card, so that a third needs the place of both; the first has let go.
struct TwoVictims {
  TwoVictims() {
    rig.BringOn("a", a, rig.Open(1));
    lease_a = rig.Mapped();
    rig.Advance(absl::Seconds(1));
    rig.BringOn("b", b, rig.Open(2));
    lease_b = rig.Mapped();
    rig.effects.clear();
    request = rig.Activate("c");
    rig.Measured();
    rig.Feed(UseWordsClosed{a, {}});
    rig.Feed(LeaseReleased{lease_a, 1});
  }
  ArbiterRig rig{2 * kSize + 2 * kMiB};
  const ModelId a = rig.Register("a", kSize);
  const ModelId b = rig.Register("b", kSize);
  const ModelId c = rig.Register("c", 2 * kSize);
  LeaseId lease_a;
  LeaseId lease_b;
  RequestId request;
};

TEST_CASE("Where one of two victims will not go, the other one stays too, and its lease gets its cells back") {
  TwoVictims victims;
  ArbiterRig& rig = victims.rig;
  rig.Feed(UseWordsClosed{victims.b, {victims.lease_b}});
  rig.Feed(UseWordsReopened{victims.b, {}});
  CHECK(ReasonOf(rig.OnlyReply().status) == "IN_USE");
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.model(victims.a).state == ModelState::kActive);
  CHECK(rig.model(victims.b).state == ModelState::kActive);
  const auto sent = rig.Take<SendCells>();
  REQUIRE(sent.size() == 1);
  CHECK(sent[0].lease == victims.lease_a);
  CHECK(sent[0].generation == 2);
}

TEST_CASE("An activation that is given up when its victims have let go evicts none of them") {
  TwoVictims victims;
  ArbiterRig& rig = victims.rig;
  rig.Feed(UseWordsClosed{victims.b, {}});
  rig.Feed(RequestCancelled{victims.request});
  // Faster than the word was opened again.
  rig.Feed(LeaseReleased{victims.lease_b, 1});
  rig.Feed(UseWordsReopened{victims.b, {victims.lease_b}});
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.model(victims.a).state == ModelState::kActive);
  CHECK(rig.model(victims.b).state == ModelState::kActive);
  CHECK(rig.Take<SendCells>().size() == 2);
}

TEST_CASE("A victim that could not be taken off is active again with its reason, and its lease gets its cells back") {
  ArbiterRig rig(kSize + 2 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const ModelId b = rig.Register("b", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId lease = rig.Mapped();
  rig.Activate("b");
  rig.Measured();
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(LeaseReleased{lease, 1});
  rig.effects.clear();
  const absl::Status stuck = absl::InternalError("cuMemUnmap: CUDA_ERROR_INVALID_VALUE");
  bool broken = false;
  SECTION("whole again") {}
  SECTION("or broken") { broken = true; }
  rig.Feed(PlanRealized{
      .model = b, .status = stuck, .givers = {{.model = a, .status = stuck, .broken = broken, .device_bytes = kSize}}});
  CHECK(rig.OnlyReply().status == stuck);
  CHECK(rig.model(b).state == ModelState::kInactive);
  CHECK(rig.model(a).state == (broken ? ModelState::kBroken : ModelState::kActive));
  CHECK(rig.model(a).last_error == stuck);
  CHECK(rig.Take<SendCells>().size() == (broken ? 0 : 1));
}

}  // namespace
}  // namespace residency
