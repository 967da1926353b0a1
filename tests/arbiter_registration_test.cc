// SPDX-License-Identifier: Apache-2.0
//
// The core on registrations: who gets a name, and what a reading that is given up leaves.
#include <algorithm>
#include <catch2/catch.hpp>
#include <optional>
#include <string>

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

// A registration of the same files under any name, with what is measured and chosen.
RegisterRequested Asked(uint64_t request, const std::string& name, PinPolicy pin = PinPolicy::kAuto, HostRoom host = {},
                        const std::string& identity = "files") {
  return {.request = RequestId{request},
          .name = name,
          .identity = identity,
          .device = DeviceId{1},
          .layout = ArbiterRig::LayoutOf(kSize),
          .pin = pin,
          .host = host};
}

TEST_CASE("Without a choice a set is page-locked where the host has at least twice as much, and the reply says why") {
  struct Case {
    PinPolicy policy;
    std::optional<uint64_t> available_bytes;
    PinWish wish;
    PinReason reason;
  };
  const Case kCases[] = {
      {PinPolicy::kAuto, 2 * kSize, PinWish::kTry, PinReason::kRoom},
      {PinPolicy::kAuto, std::nullopt, PinWish::kTry, PinReason::kRoom},
      {PinPolicy::kAuto, 2 * kSize - 1, PinWish::kNo, PinReason::kLittleRoom},
      {PinPolicy::kAuto, kSize, PinWish::kNo, PinReason::kLittleRoom},
      {PinPolicy::kYes, kSize, PinWish::kMust, PinReason::kRequested},
      {PinPolicy::kNo, 100 * kSize, PinWish::kNo, PinReason::kRequested},
  };
  for (const Case& c : kCases) {
    ArbiterRig rig(64 * kMiB);
    rig.Feed(Asked(1, "a", c.policy, {.available_bytes = c.available_bytes}));
    const BuildMirrors build = rig.Take<BuildMirrors>().at(0);
    INFO("policy " << static_cast<int>(c.policy) << ", available " << c.available_bytes.value_or(0));
    CHECK(build.pin == c.wish);
    rig.Feed(MirrorsBuilt{build.model, absl::OkStatus(), c.wish == PinWish::kNo ? 0 : kSize});
    const PinOutcome pin = std::get<RegisterOutcome>(rig.OnlyReply().outcome).pin;
    CHECK(pin.reason == c.reason);
    CHECK(pin.pinned == (c.wish != PinWish::kNo));
    CHECK_FALSE(pin.message.empty());
    CHECK(rig.arbiter().records().pageable_bytes() == (pin.pinned ? 0 : kSize));
  }
}

TEST_CASE("A model in the host tier file is locked whatever the room, and shares its copy with that tier alone") {
  ArbiterRig rig(64 * kMiB);
  const auto asked = [](uint64_t request, const std::string& name, HostTier tier, PinPolicy pin = PinPolicy::kAuto) {
    RegisterRequested event = Asked(request, name, pin, {.available_bytes = 3 * kSize});
    event.tier = tier;
    event.file_bytes = kSize + 4096;
    return event;
  };
  rig.Feed(asked(1, "a", HostTier::kFile));
  const BuildMirrors a = rig.Take<BuildMirrors>().at(0);
  CHECK(a.tier == HostTier::kFile);
  CHECK(a.pin == PinWish::kMust);
  rig.Feed(MirrorsBuilt{a.model, absl::OkStatus(), kSize + 4096});
  const PinOutcome pin = std::get<RegisterOutcome>(rig.OnlyReply().outcome).pin;
  CHECK(pin.reason == PinReason::kHostTier);
  CHECK(pin.pinned);
  rig.Feed(asked(2, "b", HostTier::kFile));
  const BuildMirrors b = rig.Take<BuildMirrors>().at(0);
  CHECK(b.copy == a.copy);
  rig.Feed(asked(3, "c", HostTier::kMirror));
  const BuildMirrors c = rig.Take<BuildMirrors>().at(0);
  CHECK(c.copy != a.copy);
  CHECK(c.tier == HostTier::kMirror);
  rig.Feed(MirrorsBuilt{b.model, absl::OkStatus(), kSize + 4096});
  rig.Feed(MirrorsBuilt{c.model, absl::OkStatus(), kSize});
  CHECK(rig.arbiter().records().page_cache_bytes() == kSize + 4096);
  CHECK(rig.arbiter().records().pinned_bytes() == 2 * kSize + 4096);
  // It takes the host's memory as a mirror does, since nobody can have the pages back.
  CHECK(rig.arbiter().records().host_bytes() == 2 * kSize + 4096);
}

TEST_CASE("In the host tier file a model needs the pages that are locked, which may be more than the set, or less") {
  for (const uint64_t file_bytes : {kSize + 2 * kMiB, kSize - kMiB}) {
    RegisterRequested event = Asked(1, "a", PinPolicy::kAuto, {.available_bytes = file_bytes});
    event.tier = HostTier::kFile;
    event.file_bytes = file_bytes;
    ArbiterRig fits(64 * kMiB);
    fits.Feed(event);
    CHECK(fits.Has<BuildMirrors>());
    CHECK(fits.arbiter().records().host_bytes() == file_bytes);
    const auto refused_with = [&event](HostRoom host, Budget budget) {
      event.host = host;
      event.budget = budget;
      ArbiterRig rig(64 * kMiB);
      rig.Feed(event);
      const auto refusal = GetRefusal(rig.OnlyReply().status);
      CHECK(refusal.has_value());
      return refusal.value_or(Refusal{});
    };
    for (const Refusal& refusal :
         {refused_with({.available_bytes = file_bytes - 1}, {}), refused_with({}, {.host_bytes = file_bytes - 1})}) {
      CHECK(refusal.reason == "HOST_BUDGET");
      CHECK(refusal.needed_bytes == file_bytes);
      CHECK(refusal.available_bytes == file_bytes - 1);
    }
  }
}

TEST_CASE("Two names registered at the same moment for the same files in the host tier file have one copy") {
  for (const PinPolicy policy : {PinPolicy::kAuto, PinPolicy::kYes}) {
    ArbiterRig rig(64 * kMiB);
    RegisterRequested event = Asked(1, "a");
    event.tier = HostTier::kFile;
    rig.Feed(event);
    const BuildMirrors a = rig.Take<BuildMirrors>().at(0);
    event = Asked(2, "b", policy);
    event.tier = HostTier::kFile;
    rig.Feed(event);
    CHECK(rig.Take<BuildMirrors>().at(0).copy == a.copy);
    // Not once nobody wants the first one any more.
    rig.Feed(RequestCancelled{RequestId{1}});
    rig.Feed(RequestCancelled{RequestId{2}});
    event = Asked(3, "c", policy);
    event.tier = HostTier::kFile;
    rig.Feed(event);
    CHECK(rig.Take<BuildMirrors>().at(0).copy != a.copy);
  }
}

TEST_CASE("Locked pages of weight files, which the system still calls available, are room for nobody") {
  ArbiterRig rig(64 * kMiB);
  RegisterRequested files = Asked(1, "files", PinPolicy::kAuto, {}, "others");
  files.tier = HostTier::kFile;
  files.file_bytes = 3 * kMiB;
  rig.Feed(files);
  const BuildMirrors build = rig.Take<BuildMirrors>().at(0);
  const auto plan = [&rig](PinPolicy pin, uint64_t available_bytes) {
    return rig.arbiter().PlanHost(Asked(2, "a", pin, {.available_bytes = available_bytes}));
  };
  const auto check = [&] {
    const Records& records = rig.arbiter().records();
    CHECK(plan(PinPolicy::kNo, kSize + 3 * kMiB).room.ok());
    const HostPlan refused = plan(PinPolicy::kNo, kSize + 3 * kMiB - 1);
    CHECK(GetRefusal(refused.room)->available_bytes == kSize - 1);
    CHECK(plan(PinPolicy::kNo, kMiB).available_bytes == 0);
    CHECK(plan(PinPolicy::kAuto, 2 * kSize + 3 * kMiB).pin.reason == PinReason::kRoom);
    CHECK(plan(PinPolicy::kAuto, 2 * kSize + 3 * kMiB - 1).pin.reason == PinReason::kLittleRoom);
    CHECK_FALSE(plan(PinPolicy::kYes, 2 * kSize + 3 * kMiB).little_room);
    CHECK(plan(PinPolicy::kYes, 2 * kSize + 3 * kMiB - 1).little_room);
    // What all copies may take is what there is and the rest; before, the pages counted on both sides.
    CHECK(HostBudgetBytes({.available_bytes = kSize + 3 * kMiB}, records, std::nullopt) == 3 * kMiB + kSize);
  };
  // Also while they are being locked.
  check();
  rig.Feed(MirrorsBuilt{build.model, absl::OkStatus(), 3 * kMiB});
  check();
}

TEST_CASE("The host tier file is refused for a phased model, for a pageable one, and for a name with the other tier") {
  ArbiterRig rig(64 * kMiB);
  RegisterRequested event = Asked(1, "a");
  event.tier = HostTier::kFile;
  event.mode = ModelMode::kPhased;
  rig.Feed(event);
  CHECK(ReasonOf(rig.OnlyReply().status) == "BAD_HOST_TIER");
  event.mode = ModelMode::kHeld;
  event.pin = PinPolicy::kNo;
  rig.Feed(event);
  CHECK(ReasonOf(rig.OnlyReply().status) == "BAD_PIN");
  CHECK(rig.Take<BuildMirrors>().empty());
  rig.Feed(Asked(2, "a"));
  REQUIRE(rig.Take<BuildMirrors>().size() == 1);
  event.pin = PinPolicy::kAuto;
  rig.Feed(event);
  const absl::Status taken = rig.OnlyReply().status;
  CHECK(ReasonOf(taken) == "NAME_TAKEN");
  CHECK(taken.message() == "the name 'a' is registered with the host tier mirror, not file; unload it first");
}

TEST_CASE("A driver that refuses to page-lock leaves the model pageable, and its limit is kept until it is disproved") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(Asked(1, "a"));
  const ModelId a = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(MirrorsBuilt{a, absl::OkStatus(), 0, Refuse(absl::StatusCode::kResourceExhausted, "PIN_LIMIT", "no more"),
                        kSize / 2});
  const Reply reply = rig.OnlyReply();
  CHECK(reply.status.ok());
  const PinOutcome pin = std::get<RegisterOutcome>(reply.outcome).pin;
  CHECK(pin.reason == PinReason::kRefused);
  CHECK_FALSE(pin.pinned);
  const Records& records = rig.arbiter().records();
  CHECK(records.pin_limit_bytes == kSize / 2);
  CHECK(records.pinned_bytes() == 0);
  CHECK(records.pageable_bytes() == kSize);

  // Asked for by force it fails, as the driver says; the next one shows that the limit has risen.
  const absl::Status refused = Refuse(absl::StatusCode::kResourceExhausted, "PIN_LIMIT", "no more");
  rig.Feed(Asked(2, "b", PinPolicy::kYes, {}, "others"));
  rig.Feed(MirrorsBuilt{rig.Take<BuildMirrors>().at(0).model, refused, 0, refused, kSize / 4});
  CHECK(ReasonOf(rig.OnlyReply().status) == "PIN_LIMIT");
  CHECK(records.pin_limit_bytes == kSize / 4);
  rig.Feed(Asked(3, "c", PinPolicy::kYes, {}, "others"));
  rig.Feed(MirrorsBuilt{rig.Take<BuildMirrors>().at(0).model, absl::OkStatus(), kSize});
  CHECK(records.pin_limit_bytes == std::nullopt);
}

TEST_CASE("No registration exceeds what was configured, what a cgroup leaves, or what the host has") {
  struct Case {
    HostRoom host;
    std::optional<uint64_t> configured_bytes;
    std::optional<uint64_t> refused_with_bytes;  // nothing: it fits
  };
  const uint64_t held = kSize;  // by a model that is there
  const Case kCases[] = {
      {{.available_bytes = kSize}, std::nullopt, std::nullopt},
      {{.available_bytes = kSize - 1}, std::nullopt, kSize - 1},
      {{.available_bytes = kSize, .cgroup_limit_bytes = held + kSize}, held + kSize, std::nullopt},
      {{.available_bytes = 9 * kSize, .cgroup_limit_bytes = held + kSize - 1}, std::nullopt, kSize - 1},
      {{.available_bytes = 9 * kSize, .cgroup_limit_bytes = 0}, std::nullopt, 0},
      {{.available_bytes = 9 * kSize, .cgroup_limit_bytes = 9 * kSize}, held + 5, 5},
      {{}, std::nullopt, std::nullopt},
  };
  for (const Case& c : kCases) {
    ArbiterOptions options;
    options.devices = {{.id = DeviceId{1}, .uuid = "GPU-test", .budget_bytes = kSize}};
    options.host_budget_bytes = c.configured_bytes;
    Arbiter arbiter(options);
    arbiter.Step(Asked(1, "there", PinPolicy::kAuto, {}, "others"), absl::UnixEpoch());
    const auto effects = arbiter.Step(Asked(2, "a", PinPolicy::kNo, c.host), absl::UnixEpoch());
    REQUIRE(effects.size() == 1);
    INFO("configured " << c.configured_bytes.value_or(0) << ", cgroup " << c.host.cgroup_limit_bytes.value_or(0));
    const auto* reply = std::get_if<Reply>(&effects[0]);
    CHECK((reply != nullptr) == c.refused_with_bytes.has_value());
    if (reply == nullptr) continue;
    const auto refusal = GetRefusal(reply->status);
    REQUIRE(refusal.has_value());
    CHECK(refusal->reason == "HOST_BUDGET");
    CHECK(refusal->needed_bytes == kSize);
    CHECK(refusal->available_bytes == c.refused_with_bytes);
    CHECK(arbiter.records().models.size() == 1);
  }
}

TEST_CASE("Two names for the same files have one host copy, which counts once and as long as one of them is there") {
  ArbiterRig rig(64 * kMiB);
  // There is no room for a second copy.
  rig.Feed(Asked(1, "a", PinPolicy::kAuto, {.available_bytes = 2 * kSize}));
  const BuildMirrors first = rig.Take<BuildMirrors>().at(0);
  rig.Feed(Asked(2, "b", PinPolicy::kAuto, {.available_bytes = 0}));
  const BuildMirrors second = rig.Take<BuildMirrors>().at(0);
  CHECK(second.copy == first.copy);
  const Records& records = rig.arbiter().records();
  CHECK(records.host_bytes() == kSize);
  rig.Feed(MirrorsBuilt{first.model, absl::OkStatus(), kSize});
  rig.Feed(MirrorsBuilt{second.model, absl::OkStatus(), kSize});
  const auto replies = rig.Take<Reply>();
  REQUIRE(replies.size() == 2);
  CHECK(std::get<RegisterOutcome>(replies[1].outcome).pin.reason == PinReason::kShared);
  CHECK(std::get<RegisterOutcome>(replies[1].outcome).pinned_bytes == kSize);
  CHECK(records.pinned_bytes() == kSize);

  rig.Feed(UnloadRequested{RequestId{3}, "a"});
  CHECK(rig.Take<DropModel>().size() == 1);
  rig.Feed(ModelDropped{first.model, 0, 0});
  CHECK(records.host_bytes() == kSize);
  CHECK(records.pinned_bytes() == kSize);
  rig.Feed(Asked(4, "c", PinPolicy::kAuto, {.available_bytes = 0}));
  const BuildMirrors third = rig.Take<BuildMirrors>().at(0);
  CHECK(third.copy == first.copy);
  rig.Feed(MirrorsBuilt{third.model, absl::OkStatus(), kSize});
  for (const char* name : {"b", "c"}) rig.Feed(UnloadRequested{RequestId{5}, name});
  rig.Feed(ModelDropped{second.model, 0, 0});
  rig.Feed(ModelDropped{third.model, kSize, 0});
  CHECK(records.host_bytes() == 0);
}

TEST_CASE("A host copy is not shared with who insists on another kind, nor once it is given up or given back") {
  const HostRoom room{.available_bytes = 100 * kSize};
  const auto is_shared = [&](ArbiterRig& rig, PinPolicy policy) {
    rig.Feed(Asked(9, "other", policy, room));
    const BuildMirrors build = rig.Take<BuildMirrors>().at(0);
    const bool shared = build.copy == rig.arbiter().records().models.begin()->second.host_copy;
    rig.Feed(RequestCancelled{RequestId{9}});
    rig.Feed(MirrorsBuilt{build.model, absl::CancelledError("")});
    rig.effects.clear();
    return shared;
  };
  for (const bool pinned : {true, false}) {
    ArbiterRig rig(64 * kMiB);
    rig.Feed(Asked(1, "a", pinned ? PinPolicy::kYes : PinPolicy::kNo, room));
    const ModelId model = rig.Take<BuildMirrors>().at(0).model;
    INFO("pinned " << pinned);
    // One that must be page-locked may fail yet, for no fault of somebody who does not insist.
    CHECK(is_shared(rig, PinPolicy::kAuto) == !pinned);
    CHECK(is_shared(rig, PinPolicy::kYes) == pinned);
    CHECK(is_shared(rig, PinPolicy::kNo) == !pinned);
    rig.Feed(MirrorsBuilt{model, absl::OkStatus(), pinned ? kSize : 0});
    CHECK(is_shared(rig, PinPolicy::kAuto));
    CHECK(is_shared(rig, PinPolicy::kYes) == pinned);
    CHECK(is_shared(rig, PinPolicy::kNo) == !pinned);
    rig.Feed(UnloadRequested{RequestId{2}, "a"});
    CHECK_FALSE(is_shared(rig, PinPolicy::kAuto));
  }
  ArbiterRig rig(64 * kMiB);
  rig.Feed(Asked(1, "a", PinPolicy::kAuto, room));
  rig.Take<BuildMirrors>();
  rig.Feed(RequestCancelled{RequestId{1}});
  CHECK_FALSE(is_shared(rig, PinPolicy::kAuto));
}

TEST_CASE("The host budget holds for all models together, also for those that are still being read") {
  ArbiterOptions options;
  options.devices = {{.id = DeviceId{1}, .uuid = "GPU-test", .budget_bytes = kSize}};
  options.host_budget_bytes = 2 * kSize + 2 * kMiB;
  Arbiter arbiter(options);
  const auto ask = [&](uint64_t number, const std::string& name) {
    const auto effects =
        arbiter.Step(RegisterRequested{RequestId{number}, name, name, DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)},
                     absl::UnixEpoch());
    REQUIRE(effects.size() == 1);
    return effects[0];
  };
  const Effect first = ask(1, "a");
  REQUIRE(std::holds_alternative<BuildMirrors>(first));
  (void)arbiter.Step(MirrorsBuilt{std::get<BuildMirrors>(first).model, absl::OkStatus(), kSize}, absl::UnixEpoch());
  CHECK(std::holds_alternative<BuildMirrors>(ask(2, "b")));
  const Effect third = ask(3, "c");
  REQUIRE(std::holds_alternative<Reply>(third));
  const auto refusal = GetRefusal(std::get<Reply>(third).status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "HOST_BUDGET");
  CHECK(refusal->needed_bytes == kSize);
  CHECK(refusal->available_bytes == 2 * kMiB);
}

TEST_CASE("A reading that was given up is begun again for whoever asks meanwhile") {
  ArbiterRig rig(64 * kMiB);
  rig.Feed(RegisterRequested{RequestId{1}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)});
  const ModelId model = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(RequestCancelled{RequestId{1}});
  // What the given up one has of the host's memory was missing when this was measured.
  RegisterRequested again{RequestId{2}, "a", "files", DeviceId{1}, {}, ArbiterRig::LayoutOf(kSize)};
  again.host.available_bytes = kMiB;
  rig.Feed(again);
  rig.effects.clear();
  const bool stopped = GENERATE(true, false);
  rig.Feed(MirrorsBuilt{model, stopped ? absl::CancelledError("") : absl::OkStatus(), stopped ? 0 : kSize});
  CHECK(rig.Has<Reply>() == !stopped);
  if (stopped) {
    const BuildMirrors build = rig.Take<BuildMirrors>().at(0);
    CHECK(build.request == RequestId{2});
    rig.Feed(MirrorsBuilt{build.model, absl::OkStatus(), kSize});
  }
  CHECK(rig.OnlyReply().status.ok());
  CHECK_FALSE(rig.Has<DropModel>());
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

TEST_CASE("A registration that comes while the same model's memory is given back begins when that is done") {
  ArbiterRig rig(64 * kMiB);
  const ModelId model = rig.Register("a", kSize);
  rig.Feed(UnloadRequested{RequestId{50}, "a"});
  REQUIRE(rig.Take<DropModel>().size() == 1);
  const auto ask = [&](uint64_t request) {
    rig.Feed(RegisterRequested{RequestId{request}, "a", "a", DeviceId{1}, Budget{}, ArbiterRig::LayoutOf(kSize)});
  };
  ask(51);
  ask(52);
  CHECK_FALSE(rig.Has<Reply>());
  rig.Feed(RequestCancelled{RequestId{52}});
  CHECK(rig.OnlyReply().status.code() == absl::StatusCode::kCancelled);
  rig.Feed(ModelDropped{model, kSize, 0});
  CHECK(rig.OnlyReply().request == RequestId{50});
  const auto builds = rig.Take<BuildMirrors>();
  REQUIRE(builds.size() == 1);
  CHECK(builds[0].model != model);
  rig.Feed(MirrorsBuilt{builds[0].model, absl::OkStatus(), kSize});
  CHECK(rig.OnlyReply().request == RequestId{51});
}

TEST_CASE("A model that is registered again before it is unloaded for want of anybody stays") {
  ArbiterRig rig(64 * kMiB);
  const ModelId busy = rig.Register("busy", kSize);
  rig.Activate("busy");
  rig.effects.clear();
  const auto ask = [&](uint64_t request) {
    rig.Feed(RegisterRequested{RequestId{request}, "a", "a", DeviceId{1}, Budget{}, ArbiterRig::LayoutOf(kSize)});
  };
  ask(51);
  const ModelId model = rig.Take<BuildMirrors>().at(0).model;
  rig.Feed(RequestCancelled{RequestId{51}});
  rig.effects.clear();
  // Its bytes are there all the same, and the device is busy with another one.
  rig.Feed(MirrorsBuilt{model, absl::OkStatus(), kSize});
  const bool again = GENERATE(true, false);
  if (again) {
    ask(52);
    CHECK(rig.OnlyReply().status.ok());
  }
  rig.Measured();
  rig.Realized(busy);
  CHECK(rig.Has<DropModel>() == !again);
}

}  // namespace
}  // namespace residency
