// SPDX-License-Identifier: Apache-2.0
//
// Page-locking that fails, or lasts long enough to be interrupted. Only the simulated driver can be told to do either.
#include <grpcpp/client_context.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <csignal>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/grpc_status.h"
#include "tests/daemon_rig.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A reader's hashes of what is on the device.
Json OnDevice(DaemonRig& rig, const std::string& model) {
  ReaderClient reader(rig, model);
  return reader.Ask("hash").at("sha256");
}

TEST_CASE("A model that must be page-locked and cannot be is refused with asked, had and limit, and harms nobody") {
  DaemonRig rig({"--sim_faults=pin_limit=64MiB"});
  WriteCheckpoint(rig.Path("a.safetensors"), {40 * kMiB}, 21);
  WriteCheckpoint(rig.Path("b.safetensors"), {40 * kMiB}, 22);
  const Hashes small_truth = WriteCheckpoint(rig.Path("small.safetensors"), {3 * kMiB, 100}, 23);
  const std::vector<std::string> components = {"--component", "a=" + rig.Path("a.safetensors"), "--component",
                                               "b=" + rig.Path("b.safetensors")};
  std::vector<std::string> must = {"register", "large", "--pin", "yes"};
  must.insert(must.end(), components.begin(), components.end());
  const Json error = rig.Refused(must);
  INFO(error.dump());
  CHECK(error.at("code") == "RESOURCE_EXHAUSTED");
  CHECK(error.at("reason") == "PIN_LIMIT");
  CHECK(error.at("needed_bytes") == 80 * kMiB);
  CHECK(error.at("available_bytes") == 40 * kMiB);
  const std::string message = error.at("message");
  CHECK(absl::StrContains(message, absl::StrCat(80 * kMiB)));
  CHECK(absl::StrContains(message, absl::StrCat("limit met is ", 40 * kMiB)));
  CHECK_FALSE(absl::StrContains(message, "GPU"));
  Json host = rig.Status().at("host");
  CHECK(host.at("pinned_bytes") == 0);
  CHECK(host.at("pageable_bytes") == 0);
  CHECK(host.at("pin_limit_bytes") == 40 * kMiB);
  CHECK(host.at("pin_limit_source") == "probed");

  // Nothing of the refusal comes up in what follows, and all of the limit is there again.
  const Json small = rig.Do({"register", "small", rig.Path("small.safetensors"), "--pin", "yes"});
  CHECK(small.at("pin").at("pinned") == true);
  CHECK(OnDevice(rig, "small") == small_truth);
  rig.Do({"unload", "small"});
  rig.Do({"register", "a", rig.Path("a.safetensors"), "--pin", "yes"});
  rig.Do({"register", "b", rig.Path("b.safetensors")});
  CHECK(rig.Model("a").at("pinned_bytes") == 40 * kMiB);
  CHECK(rig.Model("b").at("pinned_bytes") == 0);
}

TEST_CASE("By itself a model that cannot be page-locked stays pageable, is shown so, and activates with its bytes") {
  DaemonRig rig({"--sim_faults=pin_limit=64MiB"});
  const Hashes a_truth = WriteCheckpoint(rig.Path("a.safetensors"), {40 * kMiB, 77}, 24);
  const Hashes b_truth = WriteCheckpoint(rig.Path("b.safetensors"), {30 * kMiB, 41}, 25);
  const Json registered = rig.Do({"register", "large", "--component", "a=" + rig.Path("a.safetensors"), "--component",
                                  "b=" + rig.Path("b.safetensors")});
  CHECK(registered.at("pinned_bytes") == 0);
  CHECK(registered.at("pin").at("pinned") == false);
  CHECK(registered.at("pin").at("reason") == "refused");
  CHECK(absl::StrContains(registered.at("pin").at("message").get<std::string>(), "limit met"));
  const Json status = rig.Status();
  const uint64_t set_bytes =
      registered.at("payload_bytes").get<uint64_t>() + registered.at("tax_bytes").get<uint64_t>();
  CHECK(status.at("host").at("pinned_bytes") == 0);
  CHECK(status.at("host").at("pageable_bytes") == set_bytes);
  CHECK(status.at("models")[0].at("pin").at("reason") == "refused");
  CHECK(absl::StrContains(rig.Ctl({"status"}).output, "host copy: pageable: "));

  const Json activated = rig.Do({"activate", "large"});
  CHECK(activated.at("bytes_moved") == set_bytes);
  const Json verified = rig.Do({"verify", "large"});
  CHECK(verified.at("refilled_cells") == 0);
  const Json on_device = OnDevice(rig, "large");
  CHECK(on_device.size() == a_truth.size() + b_truth.size());
  for (const auto& [name, hash] : on_device.items()) {
    INFO(name);
    const std::string tensor = name.substr(name.find('/') + 1);
    CHECK(hash == (name.starts_with("a/") ? a_truth.at(tensor) : b_truth.at(tensor)));
  }
}

TEST_CASE("Reading waits for no page-locking, which is told as it goes on and is given up with the registration") {
  DaemonRig rig({"--sim_faults=cuMemHostRegister=+400ms,cuMemHostRegister@1=+1s"});
  v1::RegisterModelRequest request;
  request.set_name("large");
  std::vector<std::string> by_hand = {"register", "large"};
  for (const std::string name : {"a", "b", "c", "d"}) {
    WriteCheckpoint(rig.Path(name), {2 * kMiB}, 38);
    v1::ComponentSource& component = *request.add_components();
    component.set_name(name);
    component.set_path(rig.Path(name));
    by_hand.insert(by_hand.end(), {"--component", absl::StrCat(name, "=", rig.Path(name))});
  }
  auto client = Client::Connect({rig.runtime_dir(), "end_to_end_pin", absl::Seconds(5)});
  REQUIRE(client.ok());
  grpc::ClientContext context;
  const auto stream = (*client)->service().RegisterModel(&context, request);
  std::vector<v1::RegisterModelResponse> messages;
  for (v1::RegisterModelResponse message; stream->Read(&message);) messages.push_back(message);
  REQUIRE(FromGrpcStatus(stream->Finish()).ok());
  REQUIRE(messages.size() >= 3);
  // All four were read while the first one was being locked.
  CHECK(messages[0].bytes_done() == 8 * kMiB);
  CHECK(messages[0].pinned_bytes() == 0);
  for (size_t i = 1; i < messages.size(); ++i) CHECK(messages[i - 1].pinned_bytes() <= messages[i].pinned_bytes());
  CHECK(messages[1].pinned_bytes() == 2 * kMiB);
  CHECK_FALSE(messages[1].done());
  CHECK(messages.back().pinned_bytes() == 8 * kMiB);
  CHECK(messages.back().done());
  rig.Do({"unload", "large"});

  const auto given_up = rig.StartCtl(by_hand);
  rig.Await("some of it is page-locked", [](const Json& status) {
    const Json& models = status.at("models");
    return models.size() == 1 && models[0].at("state") == "registering" && models[0].at("pinned_bytes") >= 2 * kMiB;
  });
  given_up->Signal(SIGINT);
  CHECK(given_up->Wait() != 0);
  rig.Await("nothing of it is left", [](const Json& status) { return status.at("models").empty(); });
  CHECK(rig.Status().at("host").at("pinned_bytes") == 0);
}

TEST_CASE("Where the driver locks nothing for reading only, the host tier file is refused with that reason") {
  DaemonRig rig({"--sim_faults=attr:READONLY_PIN=0"});
  WriteCheckpoint(rig.Path("a.safetensors"), {kMiB}, 38);
  const std::vector<std::string> in_files = {"register", "a", rig.Path("a.safetensors"), "--host_tier", "file"};
  const Json error = rig.Refused(in_files);
  CHECK(error.at("code") == "FAILED_PRECONDITION");
  CHECK(error.at("reason") == "NO_READONLY_PIN");
  std::vector<std::string> dry = in_files;
  dry.push_back("--dry_run");
  CHECK(rig.Refused(dry).at("reason") == "NO_READONLY_PIN");
  CHECK(rig.Do({"register", "a", rig.Path("a.safetensors")}).at("host_tier") == "mirror");
}

TEST_CASE("Files that cannot be locked as a whole are refused in the host tier file, with both figures") {
  DaemonRig rig({"--sim_faults=pin_limit=64MiB"});
  WriteCheckpoint(rig.Path("a.safetensors"), {40 * kMiB}, 39);
  const Hashes truth = WriteCheckpoint(rig.Path("b.safetensors"), {40 * kMiB}, 40);
  rig.Do({"register", "a", rig.Path("a.safetensors"), "--host_tier", "file"});
  const Json error = rig.Refused({"register", "b", rig.Path("b.safetensors"), "--host_tier", "file"});
  CHECK(error.at("reason") == "PIN_LIMIT");
  CHECK(error.at("needed_bytes").get<uint64_t>() >= 40 * kMiB);
  CHECK(error.at("available_bytes") == 0);
  CHECK(rig.Status().at("host").at("pin_limit_source") == "probed");
  rig.Do({"unload", "a"});
  rig.Do({"register", "b", rig.Path("b.safetensors"), "--host_tier", "file"});
  CHECK(OnDevice(rig, "b") == truth);
}

TEST_CASE("A registration that is given up leaves the host copy to another name that waits for it") {
  DaemonRig rig({"--sim_faults=cuMemHostRegister=+1s"});
  const Hashes truth = WriteCheckpoint(rig.Path("a.safetensors"), {3 * kMiB, 9}, 37);
  const auto registering = [&](size_t count) {
    rig.Await(absl::StrCat(count, " models are being registered"), [count](const Json& status) {
      const Json& models = status.at("models");
      return models.size() == count &&
             std::all_of(models.begin(), models.end(), [](const Json& m) { return m.at("state") == "registering"; });
    });
  };
  const auto first = rig.StartCtl({"register", "a", rig.Path("a.safetensors")});
  registering(1);
  const auto second = rig.StartCtl({"register", "b", rig.Path("a.safetensors")});
  registering(2);
  first->Signal(SIGINT);
  CHECK(first->Wait() != 0);
  CHECK(second->Wait() == 0);
  const Json status = rig.Status();
  REQUIRE(status.at("models").size() == 1);
  CHECK(status.at("models")[0].at("name") == "b");
  CHECK(status.at("host").at("pinned_bytes") == 4 * kMiB);
  CHECK(OnDevice(rig, "b") == truth);
}

}  // namespace
}  // namespace residency
