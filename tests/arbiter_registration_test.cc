// SPDX-License-Identifier: Apache-2.0
//
// The core on registrations: who gets a name, and what a reading that is given up leaves.
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

}  // namespace
}  // namespace residency
