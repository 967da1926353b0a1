// SPDX-License-Identifier: Apache-2.0
//
// The core on requests that activate, deactivate, verify and unload.
#include <algorithm>
#include <catch2/catch.hpp>

#include "mechanisms/refusal.h"
#include "tests/arbiter_rig.h"

namespace residency {
namespace {

constexpr uint64_t kSize = 8 * kMiB;

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

TEST_CASE(
    "A model of 16.89 GB is refused on a card of 16.611 GB with both figures, and the card is asked for nothing") {
  const uint64_t card_bytes = uint64_t{16'611'000'000};
  const uint64_t model_bytes = uint64_t{16'890'000'000};
  ArbiterRig rig(card_bytes);
  const ModelId model = rig.Register("flux", model_bytes);
  rig.Activate("flux");
  rig.Measured();
  const Reply reply = rig.OnlyReply();
  CHECK(reply.status.code() == absl::StatusCode::kResourceExhausted);
  const std::optional<Refusal> refusal = GetRefusal(reply.status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "GPU_BUDGET");
  // The payload in whole granules, 8,054 of 2 MiB.
  CHECK(refusal->needed_bytes == uint64_t{16'890'462'208});
  CHECK(refusal->available_bytes == card_bytes);
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.model(model).state == ModelState::kInactive);
  CHECK(rig.model(model).claimed_device_bytes == 0);
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
  // One effect for both, so that the link need not wait while the victim is taken off.
  REQUIRE(rig.Has<RealizePlan>());
  CHECK(std::get<RealizePlan>(rig.effects.back()).givers == std::vector<ModelId>{a});
  CHECK(rig.model(a).state == ModelState::kDeactivating);
  rig.Realized(b);
  CHECK(rig.model(a).state == ModelState::kInactive);
  CHECK(rig.model(a).claimed_device_bytes == 0);
  const Reply reply = rig.OnlyReply();
  REQUIRE(reply.status.ok());
  CHECK(std::get<ActivateOutcome>(reply.outcome).evicted == std::vector<std::string>{"a"});
  CHECK(rig.model(b).state == ModelState::kActive);
}

// "a" with two leases gives its place to "b", and one of its clients has begun to let its cells go.
struct SwapRig : ArbiterRig {
  SwapRig() : ArbiterRig(kSize + 2 * kMiB), a(Register("a", kSize)), b(Register("b", kSize)) {
    BringOn("a", a, Open(1));
    first = Mapped();
    Activate("a", Open(2));
    second = Mapped();
    effects.clear();
    Activate("b", Open(3));
    Measured();
    Take<CloseUseWords>();
    timer = Take<SetTimer>().at(0).timer;
    Feed(UseWordsClosed{a, {}});
    CHECK(Take<RevokeLease>().size() == 2);
    Feed(LeaseReleasing{first, generation(first)});
  }
  uint64_t generation(LeaseId lease) const { return arbiter().records().leases.at(lease).generation; }
  LeaseState state(LeaseId lease) const { return arbiter().records().leases.at(lease).state; }

  const ModelId a;
  const ModelId b;
  LeaseId first;
  LeaseId second;
  TimerId timer;
};

TEST_CASE("A swap begins once each of the victim's clients has begun to let its cells go") {
  SwapRig rig;
  CHECK_FALSE(rig.Has<RealizePlan>());
  rig.Feed(LeaseReleasing{rig.second, rig.generation(rig.second)});
  REQUIRE(rig.Has<RealizePlan>());
  CHECK(rig.model(rig.a).state == ModelState::kDeactivating);
  for (LeaseId lease : {rig.first, rig.second}) rig.Feed(LeaseReleased{lease, rig.generation(lease)});
  rig.Realized(rig.b);
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.model(rig.a).state == ModelState::kInactive);
  CHECK(rig.state(rig.first) == LeaseState::kRevoked);
  // What has become of the timer concerns nobody.
  rig.Feed(TimerFired{rig.timer});
  CHECK_FALSE(rig.Has<CancelRealize>());
}

TEST_CASE("A client that stops in the middle of letting its cells go costs the swap, and the victim nothing") {
  SwapRig rig;
  rig.Feed(LeaseReleased{rig.second, rig.generation(rig.second)});
  REQUIRE(rig.Take<RealizePlan>().size() == 1);
  rig.Advance(absl::Seconds(5));
  rig.Feed(TimerFired{rig.timer});
  const std::optional<Refusal> refusal = GetRefusal(rig.OnlyReply().status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "IN_USE");
  REQUIRE(refusal->holders.size() == 1);
  CHECK(refusal->holders[0].pid == 1001);
  REQUIRE(rig.Take<CancelRealize>().size() == 1);
  rig.Feed(PlanRealized{.model = rig.b,
                        .status = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "stopped"),
                        .givers = {{.model = rig.a, .device_bytes = kSize, .kept = true}}});
  CHECK(rig.model(rig.a).state == ModelState::kActive);
  CHECK(rig.model(rig.a).last_error.ok());
  CHECK(rig.model(rig.a).device_bytes == kSize);
  CHECK(rig.model(rig.b).state == ModelState::kInactive);
  CHECK(rig.model(rig.b).last_error.ok());
  // Whoever had let go gets its cells back at once, the other one when it has.
  REQUIRE(rig.Take<SendCells>().at(0).lease == rig.second);
  CHECK(rig.state(rig.first) == LeaseState::kReleasing);
  rig.Feed(LeaseReleased{rig.first, rig.generation(rig.first)});
  CHECK(rig.Take<SendCells>().at(0).lease == rig.first);
}

TEST_CASE("A deactivation waits until its clients have let all cells go") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a, rig.Open(1));
  const LeaseId lease = rig.Mapped();
  rig.Deactivate("a");
  rig.Feed(UseWordsClosed{a, {}});
  rig.Feed(LeaseReleasing{lease, 1});
  CHECK_FALSE(rig.Has<RealizePlan>());
  rig.Feed(LeaseReleased{lease, 1});
  CHECK(rig.Has<RealizePlan>());
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
    rig.Feed(UseWordsReopened{a, {}});
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

TEST_CASE("Deactivating what is inactive is no error and no work") {
  ArbiterRig rig(64 * kMiB);
  rig.Register("a", kSize);
  rig.Deactivate("a");
  CHECK(rig.OnlyReply().status.ok());
  CHECK_FALSE(rig.Has<RealizePlan>());
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

TEST_CASE("A trim waits until no bytes are on their way, and tells what was given back") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = rig.Register("a", kSize);
  rig.Activate("a");
  rig.Measured();
  rig.Feed(TrimRequested{RequestId{81}, DeviceId{1}});
  CHECK_FALSE(rig.Has<TrimPool>());
  rig.Take<Reply>();
  rig.Realized(a);
  const auto trims = rig.Take<TrimPool>();
  REQUIRE(trims.size() == 1);
  CHECK(trims[0].report);
  // Nor does anything begin before it is through.
  rig.Deactivate("a");
  CHECK_FALSE(rig.Has<RealizePlan>());
  rig.Take<Reply>();
  rig.Feed(PoolTrimmed{.device = DeviceId{1}, .trimmed_bytes = 10, .freed_bytes = 8});
  const Reply reply = rig.OnlyReply();
  CHECK(reply.request == RequestId{81});
  CHECK(reply.status.ok());
  CHECK(std::get<TrimOutcome>(reply.outcome).trimmed_bytes == 10);
  CHECK(std::get<TrimOutcome>(reply.outcome).freed_bytes == 8);
  CHECK(rig.Has<RealizePlan>());
}

TEST_CASE("A trim that its caller gives up is through before the next request begins") {
  ArbiterRig rig(64 * kMiB);
  rig.Register("a", kSize);
  rig.Feed(TrimRequested{RequestId{81}, DeviceId{1}});
  rig.Feed(TrimRequested{RequestId{82}, DeviceId{1}});
  rig.Feed(RequestCancelled{RequestId{82}});
  rig.Feed(RequestCancelled{RequestId{81}});
  CHECK(rig.Take<Reply>().size() == 2);
  rig.Activate("a");
  CHECK_FALSE(rig.Has<MeasureDevice>());
  rig.Feed(PoolTrimmed{.device = DeviceId{1}});
  CHECK(rig.Has<MeasureDevice>());
  CHECK_FALSE(rig.Has<Reply>());
}

TEST_CASE("Where idle cells are not kept a deactivation ends once they are the driver's, and counts them as freed") {
  ArbiterRig rig(64 * kMiB, absl::ZeroDuration());
  const ModelId a = rig.Register("a", kSize);
  rig.BringOn("a", a);
  rig.effects.clear();
  rig.Deactivate("a");
  rig.Realized(a);
  CHECK_FALSE(rig.Has<Reply>());
  CHECK(rig.model(a).state == ModelState::kInactive);
  REQUIRE(rig.Take<TrimPool>().size() == 1);
  SECTION("all of them") {
    rig.Feed(PoolTrimmed{.device = DeviceId{1}, .trimmed_bytes = kSize, .freed_bytes = kSize});
    const auto outcome = std::get<DeactivateOutcome>(rig.OnlyReply().outcome);
    CHECK(outcome.pooled_bytes == 0);
    CHECK(outcome.freed_bytes == kSize);
  }
  SECTION("but not those that were idle before") {
    rig.Feed(PoolTrimmed{.device = DeviceId{1}, .trimmed_bytes = kSize + 6 * kMiB, .freed_bytes = kSize + 6 * kMiB});
    const auto outcome = std::get<DeactivateOutcome>(rig.OnlyReply().outcome);
    CHECK(outcome.pooled_bytes == 0);
    CHECK(outcome.freed_bytes == kSize);
  }
  SECTION("and no more than is sure to be its own, where somebody keeps a part or others give memory back meanwhile") {
    const bool others = GENERATE(false, true);
    rig.Feed(PoolTrimmed{.device = DeviceId{1},
                         .trimmed_bytes = kSize + 6 * kMiB,
                         .freed_bytes = others ? kSize + 9 * kMiB : kSize + 4 * kMiB});
    CHECK(std::get<DeactivateOutcome>(rig.OnlyReply().outcome).freed_bytes == (others ? kSize : kSize - 2 * kMiB));
  }
  SECTION("without a figure, which is no failure of the deactivation, and is not said to be nothing") {
    rig.Feed(PoolTrimmed{DeviceId{1}, absl::InternalError("cuMemGetInfo"), kSize});
    const Reply reply = rig.OnlyReply();
    CHECK(reply.status.ok());
    CHECK(std::get<DeactivateOutcome>(reply.outcome).pooled_bytes == 0);
    CHECK(std::get<DeactivateOutcome>(reply.outcome).freed_bytes == std::nullopt);
  }
  CHECK_FALSE(rig.Has<TrimPool>());
}

TEST_CASE("What a deactivation freed is not known where the driver did not say, whatever a trim freed after it") {
  for (const absl::Duration pool_idle : {absl::ZeroDuration(), absl::Seconds(10)}) {
    ArbiterRig rig(64 * kMiB, pool_idle);
    const ModelId a = rig.Register("a", kSize);
    rig.BringOn("a", a);
    rig.effects.clear();
    rig.Deactivate("a");
    rig.Feed(PlanRealized{.model = a, .unmapped_bytes = kSize, .pooled_bytes = 2 * kMiB});
    if (pool_idle == absl::ZeroDuration()) {
      rig.Feed(PoolTrimmed{.device = DeviceId{1}, .trimmed_bytes = 2 * kMiB, .freed_bytes = 2 * kMiB});
    }
    CHECK(std::get<DeactivateOutcome>(rig.OnlyReply().outcome).freed_bytes == std::nullopt);
  }
  // That there was nothing to take off is known.
  ArbiterRig rig(64 * kMiB);
  rig.Register("a", kSize);
  rig.Deactivate("a");
  CHECK(std::get<DeactivateOutcome>(rig.OnlyReply().outcome).freed_bytes == 0);
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
