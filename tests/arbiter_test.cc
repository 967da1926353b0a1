// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <catch2/catch.hpp>

#include "mechanisms/refusal.h"
#include "tests/arbiter_rig.h"

namespace residency {
namespace {

constexpr uint64_t kSize = 8 * kMiB;

TEST_CASE("A name registers once; the same files again are no error, other files are") {
  ArbiterRig rig(64 * kMiB);
  rig.Register("a", kSize, "files-1");
  rig.Feed(RegisterRequested{RequestId{100}, "a", "files-1", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.effects.empty());
  rig.Feed(RegisterRequested{RequestId{101}, "a", "files-2", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  const Reply reply = rig.OnlyReply();
  CHECK(reply.status.code() == absl::StatusCode::kAlreadyExists);
  CHECK(ReasonOf(reply.status) == "NAME_TAKEN");
}

TEST_CASE("A registration that failed leaves the name free") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(RegisterRequested{RequestId{1}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  const ModelId model = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(MirrorsBuilt{model, absl::DataLossError("cut short"), 0});
  CHECK(rig.OnlyReply().status.code() == absl::StatusCode::kDataLoss);
  CHECK(rig.arbiter().records().models.empty());
}

TEST_CASE("Two registrations of the same files share one reading, and each is answered") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(RegisterRequested{RequestId{1}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  rig.Feed(RegisterRequested{RequestId{2}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  const auto builds = rig.Take<BuildMirrors>();
  REQUIRE(builds.size() == 1);
  CHECK(rig.Take<JoinMirrors>().size() == 1);
  rig.Feed(RequestCancelled{RequestId{1}});
  CHECK(rig.OnlyReply().status.code() == absl::StatusCode::kCancelled);
  CHECK_FALSE(rig.Has<CancelMirrors>());
  rig.Feed(MirrorsBuilt{builds[0].model, absl::OkStatus(), kSize});
  const Reply reply = rig.OnlyReply();
  CHECK(reply.request == RequestId{2});
  CHECK(reply.status.ok());
}

TEST_CASE("A reading that nobody waits for any more is given up") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(RegisterRequested{RequestId{1}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  const ModelId model = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(RequestCancelled{RequestId{1}});
  CHECK(rig.Take<CancelMirrors>().size() == 1);
  rig.Take<Reply>();
  rig.Feed(MirrorsBuilt{model, absl::CancelledError(""), 0});
  CHECK_FALSE(rig.Has<Reply>());
  CHECK(rig.arbiter().records().models.empty());
}

TEST_CASE("Unloading a model that is being registered stops the reading and answers both") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(RegisterRequested{RequestId{1}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  const ModelId model = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(UnloadRequested{RequestId{2}, "a"});
  CHECK(rig.Take<CancelMirrors>().size() == 1);
  rig.Feed(MirrorsBuilt{model, absl::CancelledError(""), 0});
  const auto replies = rig.Take<Reply>();
  REQUIRE(replies.size() == 2);
  CHECK(ReasonOf(replies[0].status) == "UNLOADED");
  CHECK(replies[1].status.ok());
  CHECK(rig.arbiter().records().models.empty());
}

TEST_CASE("A model over the host budget is refused with both figures") {
  ArbiterOptions options;
  options.devices = {{.id = DeviceId{1}, .uuid = "GPU-test", .budget_bytes = kSize}};
  options.host_budget_bytes = kSize;
  Arbiter arbiter(options);
  const auto effects =
      arbiter.Step(RegisterRequested{RequestId{1}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize + 1)},
                   absl::UnixEpoch());
  REQUIRE(effects.size() == 1);
  const auto refusal = GetRefusal(std::get<Reply>(effects[0]).status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "HOST_BUDGET");
  CHECK(refusal->needed_bytes == kSize + 2 * kMiB);
  CHECK(refusal->available_bytes == kSize);
}

TEST_CASE("Activation measures before it moves, and a second one moves nothing") {
  ArbiterRig rig(64 * kMiB);
  const ModelId model = rig.Register("a", kSize);
  rig.Activate("a");
  CHECK(rig.Take<MeasureDevice>().size() == 1);
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.model(model).state == ModelState::kInactive);
  rig.Measured();
  CHECK(rig.model(model).state == ModelState::kActivating);
  rig.Realized(model);
  const Reply reply = rig.OnlyReply();
  REQUIRE(reply.status.ok());
  CHECK(std::get<ActivateOutcome>(reply.outcome).bytes_moved == kSize);
  CHECK(rig.model(model).state == ModelState::kActive);
  rig.effects.clear();
  rig.Activate("a");
  const Reply again = rig.OnlyReply();
  REQUIRE(again.status.ok());
  CHECK(std::get<ActivateOutcome>(again.outcome).bytes_moved == 0);
  CHECK_FALSE(rig.Has<RealizePlan>());
}

TEST_CASE("What does not fit is refused with needed and available bytes before anything moves") {
  ArbiterRig rig(kSize + 2 * kMiB);
  const ModelId model = rig.Register("a", kSize);
  rig.Activate("a");
  rig.Measured(/*others_bytes=*/4 * kMiB);
  const Reply reply = rig.OnlyReply();
  CHECK(reply.status.code() == absl::StatusCode::kResourceExhausted);
  const auto refusal = GetRefusal(reply.status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "GPU_BUDGET");
  CHECK(refusal->needed_bytes == kSize);
  CHECK(refusal->available_bytes == kSize - 2 * kMiB);
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.model(model).state == ModelState::kInactive);
  // The same call succeeds once the others are gone.
  rig.effects.clear();
  rig.Activate("a");
  rig.Measured();
  rig.Realized(model);
  CHECK(rig.OnlyReply().status.ok());
}

TEST_CASE("A second model that does not fit beside an idle one takes its place") {
  ArbiterRig rig(kSize + 2 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const ModelId b = rig.Register("b", kSize);
  const SessionId session = rig.Open(1);
  rig.BringOn("a", a, session);
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();

  rig.Activate("b");
  rig.Measured();
  const auto close = rig.Take<CloseUseWords>();
  REQUIRE(close.size() == 1);
  CHECK(close[0].only_if_idle);
  CHECK(close[0].leases == std::vector<LeaseId>{lease});
  CHECK(rig.model(a).state == ModelState::kDeactivating);
  rig.Feed(UseWordsClosed{a, {}});
  CHECK(rig.Take<RevokeLease>().size() == 1);
  CHECK_FALSE(rig.Has<RealizePlan>());  // nothing is unmapped before the client has let go
  rig.Feed(LeaseReleased{lease, 1});
  rig.Realized(a);
  CHECK(rig.model(a).state == ModelState::kInactive);
  rig.Measured();
  rig.Realized(b);
  const Reply reply = rig.OnlyReply();
  REQUIRE(reply.status.ok());
  CHECK(std::get<ActivateOutcome>(reply.outcome).evicted == std::vector<std::string>{"a"});
  CHECK(rig.model(b).state == ModelState::kActive);
}

TEST_CASE("A model in use is not evicted, and the refusal names who uses it") {
  ArbiterRig rig(kSize + 2 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Register("b", kSize);
  rig.BringOn("a", a, rig.Open(7));
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();
  SECTION("as it was measured") {
    rig.Activate("b");
    rig.Measured(0, {lease});
  }
  SECTION("as its use word said a moment later") {
    rig.Activate("b");
    rig.Measured();
    rig.Feed(UseWordsClosed{a, {lease}});
  }
  const Reply reply = rig.OnlyReply();
  CHECK(reply.status.code() == absl::StatusCode::kFailedPrecondition);
  const auto refusal = GetRefusal(reply.status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "IN_USE");
  REQUIRE(refusal->holders.size() == 1);
  CHECK(refusal->holders[0].pid == 1007);
  CHECK(refusal->holders[0].lease_id == lease.value);
  CHECK(rig.model(a).state == ModelState::kActive);
  CHECK_FALSE(rig.Has<RealizePlan>());
}

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

TEST_CASE("When all idle models together make no room, none of them goes") {
  ArbiterRig rig(16 * kMiB);
  const ModelId a = rig.Register("a", 4 * kMiB);
  const ModelId b = rig.Register("b", 4 * kMiB);
  rig.Register("c", 16 * kMiB);
  rig.BringOn("a", a);
  rig.BringOn("b", b);
  rig.effects.clear();
  rig.Activate("c");
  rig.Measured(/*others_bytes=*/2 * kMiB);
  CHECK(ReasonOf(rig.OnlyReply().status) == "GPU_BUDGET");
  CHECK(rig.model(a).state == ModelState::kActive);
  CHECK(rig.model(b).state == ModelState::kActive);
}

TEST_CASE("A deactivation that a user outlasts is undone, and says who it was") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId busy = rig.Mapped();
  rig.effects.clear();
  rig.Activate("a", rig.Open(2));
  const LeaseId quick = rig.Mapped();
  rig.effects.clear();

  rig.Deactivate("a", absl::Seconds(1));
  CHECK_FALSE(rig.Take<CloseUseWords>().at(0).only_if_idle);
  const TimerId timer = rig.Take<SetTimer>().back().timer;
  rig.Feed(UseWordsClosed{a, {}});
  rig.Take<RevokeLease>();
  rig.Feed(LeaseReleased{quick, 1});
  rig.Feed(TimerFired{timer});
  CHECK(rig.Take<ReopenUseWords>().at(0).leases == std::vector<LeaseId>{busy});
  rig.Feed(UseWordsReopened{a, {}});
  const Reply reply = rig.OnlyReply();
  const auto refusal = GetRefusal(reply.status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "IN_USE");
  CHECK(refusal->holders.at(0).lease_id == busy.value);
  CHECK(rig.model(a).state == ModelState::kActive);
  // The one that had let go gets its cells back, as a generation of its own.
  const auto sent = rig.Take<SendCells>();
  REQUIRE(sent.size() == 1);
  CHECK(sent[0].lease == quick);
  CHECK(sent[0].generation == 2);
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

TEST_CASE("Deactivating what is inactive is no error and no work") {
  ArbiterRig rig(64 * kMiB);
  rig.Register("a", kSize);
  rig.Deactivate("a");
  CHECK(rig.OnlyReply().status.ok());
  CHECK_FALSE(rig.Has<RealizePlan>());
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

TEST_CASE("A failed activation leaves the model inactive, or broken where it could not be undone") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Activate("a");
  rig.Measured();
  const bool broken = GENERATE(false, true);
  rig.Feed(PlanRealized{.model = a, .status = absl::InternalError("no"), .broken = broken});
  CHECK(rig.OnlyReply().status.message() == "no");
  CHECK(rig.model(a).state == (broken ? ModelState::kBroken : ModelState::kInactive));
  rig.effects.clear();
  rig.Activate("a");
  if (broken) {
    CHECK(ReasonOf(rig.OnlyReply().status) == "BROKEN");
  } else {
    CHECK(rig.Has<MeasureDevice>());
  }
}

TEST_CASE("A deadline answers a request that waits, and the one before it goes on") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Register("b", kSize);
  rig.Activate("a");
  rig.Activate("b", SessionId{}, rig.now() + absl::Seconds(1));
  const TimerId timer = rig.Take<SetTimer>().back().timer;
  rig.Feed(TimerFired{timer});
  CHECK(ReasonOf(rig.OnlyReply().status) == "DEADLINE");
  rig.Measured();
  rig.Realized(a);
  CHECK(rig.OnlyReply().status.ok());
  // The one measurement is that of the first request: nothing was begun for the other.
  CHECK(rig.Take<MeasureDevice>().size() == 1);
}

TEST_CASE("Whoever gave up while the model came on gets no lease") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const RequestId request = rig.Activate("a", rig.Open(1));
  rig.Measured();
  rig.Feed(RequestCancelled{request});
  rig.Take<Reply>();
  rig.Realized(a);
  CHECK_FALSE(rig.Has<GrantLease>());
  CHECK_FALSE(rig.Has<Reply>());
  CHECK(rig.model(a).state == ModelState::kActive);
}

TEST_CASE("Requests on one device are taken one after the other") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  const ModelId b = rig.Register("b", kSize);
  rig.Activate("a");
  rig.Activate("b");
  rig.Deactivate("a");
  CHECK(rig.Take<MeasureDevice>().size() == 1);
  rig.Measured();
  rig.Realized(a);
  CHECK(rig.Take<MeasureDevice>().size() == 1);
  rig.Measured();
  rig.Realized(b);
  rig.Realized(a);
  CHECK(rig.Take<Reply>().size() == 3);
  CHECK(rig.model(a).state == ModelState::kInactive);
  CHECK(rig.model(b).state == ModelState::kActive);
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
  CHECK(rig.OnlyReply().status.ok());
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

TEST_CASE("Requests about a model that is not there are refused by name") {
  ArbiterRig rig(64 * kMiB);
  rig.Activate("nobody");
  CHECK(ReasonOf(rig.OnlyReply().status) == "NO_SUCH_MODEL");
  rig.Deactivate("nobody");
  CHECK(ReasonOf(rig.OnlyReply().status) == "NO_SUCH_MODEL");
  rig.Feed(UnloadRequested{RequestId{60}, "nobody"});
  CHECK(ReasonOf(rig.OnlyReply().status) == "NO_SUCH_MODEL");
  rig.Feed(VerifyRequested{RequestId{61}, "nobody"});
  CHECK(ReasonOf(rig.OnlyReply().status) == "NO_SUCH_MODEL");
  rig.Register("a", kSize);
  rig.Activate("a", SessionId{99});
  CHECK(ReasonOf(rig.OnlyReply().status) == "NO_SUCH_SESSION");
}

TEST_CASE("Idle cells go back to the driver once nothing has happened for a while") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a);
  rig.effects.clear();
  rig.Deactivate("a");
  rig.Realized(a);
  const auto timers = rig.Take<SetTimer>();
  CHECK(timers.back().at == rig.now() + absl::Seconds(10));
  rig.Feed(TimerFired{timers.back().timer});
  CHECK(rig.Take<TrimPool>().size() == 1);
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

TEST_CASE("An activation that its caller gives up before anything moved evicts nobody") {
  ArbiterRig rig(kSize + 2 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Register("b", kSize);
  rig.BringOn("a", a);
  rig.effects.clear();
  const RequestId request = rig.Activate("b");
  rig.Feed(RequestCancelled{request});
  rig.Measured();
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.model(a).state == ModelState::kActive);
  CHECK(rig.Take<Reply>().size() == 1);
}

TEST_CASE("A request means the model that had the name when it came") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Register("c", kSize);
  rig.Activate("c");  // keeps the device busy
  rig.Feed(UnloadRequested{rig.NextRequest(), "a"});
  const RequestId late = rig.NextRequest();
  rig.Feed(UnloadRequested{late, "a"});
  rig.Measured(0, {});
  rig.Realized(ModelId{a.value + 1});
  rig.effects.clear();
  rig.Feed(ModelDropped{a, kSize, 0});
  const auto replies = rig.Take<Reply>();
  REQUIRE(replies.size() == 2);
  CHECK(replies[0].status.ok());
  CHECK(replies[1].request == late);
  CHECK(ReasonOf(replies[1].status) == "NO_SUCH_MODEL");
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

TEST_CASE("A reading that was given up is begun again for whoever asks meanwhile") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(RegisterRequested{RequestId{1}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  const ModelId model = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(RequestCancelled{RequestId{1}});
  rig.Feed(RegisterRequested{RequestId{2}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  rig.effects.clear();
  rig.Feed(MirrorsBuilt{model, absl::CancelledError(""), 0});
  CHECK_FALSE(rig.Has<Reply>());
  CHECK(rig.Take<BuildMirrors>().at(0).request == RequestId{2});
  rig.Feed(MirrorsBuilt{model, absl::OkStatus(), kSize});
  CHECK(rig.OnlyReply().status.ok());
}

TEST_CASE("A registration that was given up too late to be stopped is undone") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(RegisterRequested{RequestId{1}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  const ModelId model = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(RequestCancelled{RequestId{1}});
  rig.Feed(MirrorsBuilt{model, absl::OkStatus(), kSize});
  CHECK(rig.Take<DropModel>().size() == 1);
  rig.Feed(ModelDropped{model, kSize, 0});
  CHECK(rig.arbiter().records().models.empty());
}

TEST_CASE("The timer of a deadline goes with the answer") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Activate("a", SessionId{}, rig.now() + absl::Hours(1));
  const TimerId timer = rig.Take<SetTimer>().at(0).timer;
  rig.Measured();
  rig.Realized(a);
  const auto cleared = rig.Take<SetTimer>();
  CHECK(std::any_of(cleared.begin(), cleared.end(), [&](const SetTimer& effect) {
    return effect.timer == timer && effect.at == absl::InfiniteFuture();
  }));
}

}  // namespace
}  // namespace residency
