// SPDX-License-Identifier: Apache-2.0
//
// The core on models that are activated while their last bytes are being read.
#include <catch2/catch.hpp>
#include <string>

#include "mechanisms/refusal.h"
#include "tests/arbiter_rig.h"

namespace residency {
namespace {

constexpr uint64_t kSize = 8 * kMiB;

RegisterRequested Asked(uint64_t request, const std::string& name) {
  return {RequestId{request}, name, name, DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)};
}

// "a", whose registration is request 101, little of which is left to be read.
ModelId NearlyBuilt(ArbiterRig& rig) {
  rig.Feed(Asked(101, "a"));
  const ModelId model = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(MirrorsNearlyBuilt{model});
  return model;
}

// The same with a fill under way, for the request that is returned.
RequestId Filling(ArbiterRig& rig, ModelId model) {
  const RequestId request = rig.Activate("a");
  rig.Measured();
  REQUIRE(rig.Has<RealizePlan>());
  REQUIRE(rig.model(model).state == ModelState::kActivating);
  return request;
}

absl::Status Changed() { return Refuse(absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", "it changed"); }

// The reply to `request` among those that there are, which it takes.
absl::Status AnswerTo(ArbiterRig& rig, uint64_t request) {
  absl::Status status = absl::UnknownError("no reply");
  for (const Reply& reply : rig.Take<Reply>()) {
    if (reply.request == RequestId{request}) status = reply.status;
  }
  return status;
}

TEST_CASE("A model is activated while it is read once little of it is left, and no sooner") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(Asked(101, "a"));
  const ModelId a = rig.Take<BuildMirrors>().at(0).model;
  rig.Activate("a");
  CHECK(ReasonOf(rig.OnlyReply().status) == "REGISTERING");
  rig.Feed(MirrorsNearlyBuilt{a});
  const RequestId activation = Filling(rig, a);
  // Nothing is answered before the bytes are known to be right.
  CHECK_FALSE(rig.Has<Reply>());
  rig.Feed(MirrorsBuilt{a, absl::OkStatus(), kSize});
  const Reply registered = rig.OnlyReply();
  CHECK(registered.request == RequestId{101});
  CHECK(std::get<RegisterOutcome>(registered.outcome).pinned_bytes == kSize);
  CHECK(rig.model(a).state == ModelState::kActivating);
  rig.Realized(a);
  const Reply activated = rig.OnlyReply();
  CHECK(activated.request == activation);
  CHECK(std::get<ActivateOutcome>(activated.outcome).bytes_moved == kSize);
  CHECK(rig.model(a).state == ModelState::kActive);
}

TEST_CASE("An early fill that is given up leaves the model registering, and it is registered after that") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = NearlyBuilt(rig);
  const RequestId activation = Filling(rig, a);
  rig.effects.clear();
  rig.Feed(RequestCancelled{activation});
  CHECK(rig.Take<CancelRealize>().size() == 1);
  CHECK(AnswerTo(rig, activation.value).code() == absl::StatusCode::kCancelled);
  const auto stopped = [&] { rig.Feed(PlanRealized{.model = a, .status = absl::CancelledError("stopped")}); };
  const auto built = [&] { rig.Feed(MirrorsBuilt{a, absl::OkStatus(), kSize}); };
  SECTION("stopped first") {
    stopped();
    CHECK(rig.model(a).state == ModelState::kRegistering);
    CHECK(rig.model(a).claimed_device_bytes == 0);
    built();
  }
  SECTION("read first") {
    built();
    stopped();
  }
  CHECK(AnswerTo(rig, 101).ok());
  CHECK(rig.model(a).state == ModelState::kInactive);
  CHECK(rig.model(a).last_error.ok());
}

TEST_CASE("An early activation that is refused leaves the registration to go on") {
  ArbiterRig rig(kSize / 2);
  const ModelId a = NearlyBuilt(rig);
  rig.Activate("a");
  rig.Measured();
  CHECK(ReasonOf(rig.OnlyReply().status) == "GPU_BUDGET");
  rig.Feed(MirrorsBuilt{a, absl::OkStatus(), kSize});
  CHECK(rig.OnlyReply().status.ok());
  CHECK(rig.model(a).state == ModelState::kInactive);
}

TEST_CASE("A reading that fails under a fill takes the model with it, in whichever order the two are heard of") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = NearlyBuilt(rig);
  const RequestId activation = Filling(rig, a);
  rig.effects.clear();
  SECTION("the fill first") {
    rig.Feed(PlanRealized{.model = a, .status = Changed()});
    CHECK(ReasonOf(AnswerTo(rig, activation.value)) == "FILE_CHANGED");
    CHECK(rig.model(a).state == ModelState::kRegistering);
    rig.Feed(MirrorsBuilt{a, Changed()});
  }
  SECTION("the reading first") {
    rig.Feed(MirrorsBuilt{a, Changed()});
    // Somebody copies from its memory yet.
    CHECK_FALSE(rig.Has<DropModel>());
    CHECK_FALSE(rig.Has<Reply>());
    rig.Feed(PlanRealized{.model = a, .status = absl::CancelledError("it says so in its way")});
    CHECK(ReasonOf(AnswerTo(rig, activation.value)) == "FILE_CHANGED");
  }
  CHECK(rig.Take<DropModel>().size() == 1);
  // Whoever wants the name waits until all of it is gone.
  rig.Feed(Asked(102, "a"));
  CHECK_FALSE(rig.Has<Reply>());
  CHECK_FALSE(rig.Has<BuildMirrors>());
  rig.Feed(ModelDropped{a, 0, 0});
  CHECK(ReasonOf(rig.OnlyReply().status) == "FILE_CHANGED");
  CHECK(rig.Take<BuildMirrors>().at(0).request == RequestId{102});
  CHECK_FALSE(rig.arbiter().records().models.contains(a));
}

TEST_CASE("A reading that fails while room is made for its model evicts nobody") {
  ArbiterRig rig(kSize);
  const ModelId there = rig.Register("there", kSize);
  rig.BringOn("there", there, rig.Open(1));
  const LeaseId lease = rig.Mapped();
  rig.effects.clear();
  const ModelId a = NearlyBuilt(rig);
  const RequestId activation = rig.Activate("a");
  const RequestId late = rig.Activate("a");
  rig.Measured();
  REQUIRE(rig.Take<CloseUseWords>().size() == 1);
  rig.Feed(MirrorsBuilt{a, Changed()});
  rig.Feed(UseWordsClosed{there, {}});
  rig.effects.clear();
  rig.Feed(LeaseReleased{lease, 1});
  const auto replies = rig.Take<Reply>();
  REQUIRE(replies.size() == 2);
  CHECK(replies[0].request == activation);
  CHECK(replies[1].request == late);
  for (const Reply& reply : replies) CHECK(ReasonOf(reply.status) == "FILE_CHANGED");
  CHECK_FALSE(rig.Has<RealizePlan>());
  CHECK(rig.Take<DropModel>().size() == 1);
  CHECK(rig.model(there).state == ModelState::kActive);
  rig.Feed(ModelDropped{a, 0, 0});
  CHECK(rig.OnlyReply().request == RequestId{101});
}

TEST_CASE("Unloading a model under an early fill stops the reading, and is answered when all of it is gone") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = NearlyBuilt(rig);
  const RequestId activation = Filling(rig, a);
  rig.effects.clear();
  rig.Feed(UnloadRequested{RequestId{103}, "a"});
  CHECK(rig.Take<CancelMirrors>().size() == 1);
  const bool in_time = GENERATE(true, false);
  INFO("in time: " << in_time);
  if (in_time) {
    rig.Feed(MirrorsBuilt{a, absl::CancelledError("stopped")});
    rig.Feed(PlanRealized{.model = a, .status = absl::CancelledError("stopped")});
    CHECK(ReasonOf(AnswerTo(rig, activation.value)) == "UNLOADED");
  } else {
    rig.Feed(MirrorsBuilt{a, absl::OkStatus(), kSize});
    CHECK(ReasonOf(AnswerTo(rig, 101)) == "UNLOADED");
    rig.Feed(PlanRealized{.model = a, .device_bytes = kSize, .copied_bytes = kSize});
    CHECK(AnswerTo(rig, activation.value).ok());
    rig.Feed(PlanRealized{.model = a, .unmapped_bytes = kSize});
  }
  CHECK(rig.Take<DropModel>().size() == 1);
  CHECK_FALSE(rig.Has<Reply>());
  rig.Feed(ModelDropped{a, kSize, 0});
  std::vector<Reply> replies = rig.Take<Reply>();
  REQUIRE(replies.size() == (in_time ? 2 : 1));
  if (in_time) CHECK(ReasonOf(replies[0].status) == "UNLOADED");
  CHECK(replies.back().request == RequestId{103});
  CHECK(replies.back().status.ok());
  CHECK(rig.arbiter().records().models.empty());
}

TEST_CASE("Whoever gives up unloading a model whose reading fails does not keep it from going") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = NearlyBuilt(rig);
  Filling(rig, a);
  rig.Feed(UnloadRequested{RequestId{103}, "a"});
  rig.Feed(MirrorsBuilt{a, absl::CancelledError("stopped")});
  rig.Feed(RequestCancelled{RequestId{103}});
  rig.Feed(PlanRealized{.model = a, .status = absl::CancelledError("stopped")});
  CHECK(rig.Take<DropModel>().size() == 1);
  rig.effects.clear();
  rig.Feed(ModelDropped{a, 0, 0});
  CHECK(rig.Take<Reply>().size() == 2);
}

TEST_CASE("A model that broke while it was being read is verified against nothing, and once it was read against that") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = NearlyBuilt(rig);
  Filling(rig, a);
  rig.effects.clear();
  const absl::Status driver = Refuse(absl::StatusCode::kInternal, "DRIVER", "it does not let go");
  rig.Feed(PlanRealized{.model = a, .status = driver, .broken = true, .device_bytes = kSize});
  REQUIRE(rig.model(a).state == ModelState::kBroken);
  rig.effects.clear();
  rig.Feed(VerifyRequested{RequestId{102}, "a"});
  CHECK(ReasonOf(rig.OnlyReply().status) == "REGISTERING");
  CHECK_FALSE(rig.Has<VerifyCells>());
  rig.Feed(MirrorsBuilt{a, absl::OkStatus(), kSize});
  rig.effects.clear();
  rig.Feed(VerifyRequested{RequestId{103}, "a"});
  CHECK(rig.Take<VerifyCells>().size() == 1);
}

TEST_CASE("A model whose reading failed and which cannot be taken off stays broken, is told, and can be unloaded") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = NearlyBuilt(rig);
  Filling(rig, a);
  rig.effects.clear();
  rig.Feed(MirrorsBuilt{a, Changed()});
  const absl::Status driver = Refuse(absl::StatusCode::kInternal, "DRIVER", "it does not let go");
  rig.Feed(PlanRealized{.model = a, .status = driver, .broken = true, .device_bytes = kSize});
  CHECK(rig.model(a).state == ModelState::kBroken);
  rig.effects.clear();
  rig.Feed(Asked(102, "a"));
  rig.Feed(PlanRealized{.model = a, .status = driver, .broken = true, .device_bytes = kSize});
  const auto replies = rig.Take<Reply>();
  REQUIRE(replies.size() == 2);
  CHECK(ReasonOf(replies[0].status) == "FILE_CHANGED");
  CHECK(ReasonOf(replies[1].status) == "BROKEN");
  rig.Feed(Asked(104, "a"));
  CHECK(ReasonOf(rig.OnlyReply().status) == "BROKEN");
  rig.Activate("a");
  CHECK(ReasonOf(rig.OnlyReply().status) == "FILE_CHANGED");
  rig.Feed(UnloadRequested{RequestId{105}, "a"});
  rig.Feed(PlanRealized{.model = a, .unmapped_bytes = kSize});
  rig.Feed(ModelDropped{a, 0, 0});
  CHECK(AnswerTo(rig, 105).ok());
  CHECK(rig.arbiter().records().models.empty());
}

TEST_CASE("A copy that is read under a fill is shared with another name, and with nobody once the reading has failed") {
  ArbiterRig rig(64 * kMiB);
  const ModelId a = NearlyBuilt(rig);
  Filling(rig, a);
  rig.effects.clear();
  RegisterRequested other = Asked(102, "other");
  other.identity = "a";
  rig.Feed(other);
  const BuildMirrors shared = rig.Take<BuildMirrors>().at(0);
  CHECK(shared.copy == rig.model(a).host_copy);
  rig.Feed(MirrorsBuilt{a, Changed()});
  rig.Feed(MirrorsBuilt{shared.model, Changed()});
  CHECK(ReasonOf(AnswerTo(rig, 102)) == "FILE_CHANGED");
  rig.Feed(other);
  CHECK(rig.Take<BuildMirrors>().at(0).copy != rig.model(a).host_copy);
}

}  // namespace
}  // namespace residency
