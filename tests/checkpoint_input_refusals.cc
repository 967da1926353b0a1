// SPDX-License-Identifier: Apache-2.0
//
// Paths, names and moments at which a registration is refused: each time with code, reason and file, at once, and with
// nothing left of the attempt.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "mechanisms/unique_fd.h"
#include "tests/daemon_rig.h"
#include "tests/registrar.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::string WriteText(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
  return path;
}

UniqueFd ListenOn(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  REQUIRE(path.size() < sizeof(address.sun_path));
  std::strcpy(address.sun_path, path.c_str());
  REQUIRE(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  return socket;
}

TEST_CASE("A path where no checkpoint is, is refused at once for what is there, and nothing is waited for") {
  Registrar registrar;
  DaemonRig& rig = registrar.rig();
  const std::string fifo = rig.Path("fifo.safetensors");
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  const std::string socket = rig.Path("s.safetensors");
  const UniqueFd listener = ListenOn(socket);
  WriteText(rig.Path("text/config.json"), "{}");
  WriteText(rig.Path("pickles/pytorch_model.bin"), "x");
  WriteText(rig.Path("sharded/model.safetensors.index.json"), R"({"weight_map":{"w":"shard.safetensors"}})");
  std::filesystem::create_directory(rig.Path("sharded/shard.safetensors"));

  const struct {
    std::string source;
    std::string file;
    absl::StatusCode code;
    const char* reason;
    const char* said;
  } kCases[] = {
      {rig.Path("gone"), rig.Path("gone"), absl::StatusCode::kNotFound, "NO_SUCH_FILE", "not there"},
      {rig.Path("text"), rig.Path("text"), absl::StatusCode::kInvalidArgument, "NOT_A_CHECKPOINT", "*.safetensors"},
      {rig.Path("pickles"), rig.Path("pickles"), absl::StatusCode::kInvalidArgument, "NOT_A_CHECKPOINT",
       "pytorch_model.bin"},
      {fifo, fifo, absl::StatusCode::kInvalidArgument, "NOT_A_CHECKPOINT", "a FIFO"},
      {socket, socket, absl::StatusCode::kInvalidArgument, "NOT_A_CHECKPOINT", "a socket"},
      {"/dev/zero", "/dev/zero", absl::StatusCode::kInvalidArgument, "NOT_A_CHECKPOINT", "a device"},
      {rig.Path("sharded"), rig.Path("sharded/shard.safetensors"), absl::StatusCode::kInvalidArgument,
       "NOT_A_CHECKPOINT", "a directory"},
      {"not/absolute", "", absl::StatusCode::kInvalidArgument, "BAD_PATH", "not/absolute"},
      {"", "", absl::StatusCode::kInvalidArgument, "BAD_PATH", ""},
  };
  const Memory before = registrar.Measure();
  for (const auto& c : kCases) {
    INFO(c.source);
    const Refusal refusal = registrar.Refused("input", c.source, c.code);
    CHECK(refusal.reason == c.reason);
    CHECK(refusal.file == c.file);
    CHECK(absl::StrContains(std::string(registrar.last_status().message()), c.said));
    CHECK(registrar.Measure() == before);
    CHECK(registrar.Status().models().empty());
  }
}

// A file of one tensor of zeros that takes no room, and time to read.
void WriteHollow(const std::string& path, uint64_t bytes) {
  const std::string header =
      absl::StrCat(R"({"w":{"dtype":"U8","shape":[)", bytes, R"(],"data_offsets":[0,)", bytes, "]}}");
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  for (int shift = 0; shift < 64; shift += 8) file.put(static_cast<char>(uint64_t{header.size()} >> shift));
  file << header;
  file.close();
  REQUIRE(file.good());
  std::filesystem::resize_file(path, 8 + header.size() + bytes);
}

void WriteOneByte(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  REQUIRE(::pwrite(file.get(), "x", 1, 4096) == 1);
}

TEST_CASE("A file that shrinks or changes while it is read is refused as that, and nothing is left of the attempt") {
  Registrar registrar;
  const std::string path = registrar.rig().Path("hollow.safetensors");
  const struct {
    std::function<void()> meddle;
    absl::StatusCode code;
    std::string reason;
  } kCases[] = {
      {[&] { std::filesystem::resize_file(path, kMiB); }, absl::StatusCode::kDataLoss, "FILE_TRUNCATED"},
      {[&] { WriteOneByte(path); }, absl::StatusCode::kFailedPrecondition, "FILE_CHANGED"},
  };
  const Memory before = registrar.Measure();
  for (const auto& c : kCases) {
    INFO(c.reason);
    v1::RegisterModelRequest request;
    request.set_name("hollow");
    request.set_source(path);
    absl::Status status;
    // The daemon says that it is in the midst of reading; should it be done before we act, it is asked again.
    for (int attempt = 0; ReasonOf(status) != c.reason; ++attempt) {
      REQUIRE(attempt < 20);
      WriteHollow(path, 512 * kMiB);
      bool meddled = false;
      status = registrar
                   .Register(request,
                             [&](const v1::RegisterModelResponse& progress) {
                               if (progress.bytes_done() == 0 || meddled) return;
                               meddled = true;
                               c.meddle();
                             })
                   .status();
      INFO(status.ToString());
      if (status.ok()) registrar.Unload("hollow");
      REQUIRE((status.ok() || ReasonOf(status) == c.reason || ReasonOf(status) == "FILE_CHANGED"));
    }
    CHECK(status.code() == c.code);
    CHECK(GetRefusal(status)->file == path);
    CHECK(absl::StrContains(std::string(status.message()), path));
    CHECK(registrar.Measure() == before);
    CHECK(registrar.Status().models().empty());
  }
  // The name is free for the file once it is whole.
  WriteHollow(path, kMiB);
  CHECK(registrar.Register("hollow", path).ok());
}

TEST_CASE("A taken name is no error for the same files by any path, and is refused to others and to changed ones") {
  Registrar registrar;
  DaemonRig& rig = registrar.rig();
  const std::string path = rig.Path("a.safetensors");
  WriteCheckpoint(path, {3 * kMiB}, 1);
  std::filesystem::copy_file(path, rig.Path("copy.safetensors"));
  std::filesystem::create_symlink(path, rig.Path("link.safetensors"));
  std::filesystem::create_hard_link(path, rig.Path("hard.safetensors"));
  REQUIRE(registrar.Register("a", path).ok());
  const Memory registered = registrar.Measure();
  for (const char* same : {"a.safetensors", "link.safetensors", "hard.safetensors"}) {
    INFO(same);
    const auto again = registrar.Register("a", rig.Path(same));
    REQUIRE(again.ok());
    CHECK(again->pinned_bytes() == registered.pinned_bytes);
    CHECK(registrar.Measure() == registered);
  }
  CHECK(registrar.Refused("a", rig.Path("copy.safetensors"), absl::StatusCode::kAlreadyExists).reason == "NAME_TAKEN");
  WriteOneByte(path);
  CHECK(registrar.Refused("a", path, absl::StatusCode::kAlreadyExists).reason == "NAME_TAKEN");
  CHECK(registrar.Measure() == registered);
  CHECK(registrar.Status().models_size() == 1);
}

TEST_CASE("A model's name is 1 to 128 letters, digits and . _ - / :") {
  Registrar registrar;
  const std::string path = registrar.rig().Path("a.safetensors");
  WriteCheckpoint(path, {1}, 1);
  const std::string longest(128, 'n');
  for (const std::string& good : {std::string("a"), std::string("org/Model_1.5-dev:fp8"), longest}) {
    INFO(good);
    CHECK(registrar.Register(good, path).ok());
    registrar.Unload(good);
  }
  for (const std::string& bad : {std::string(), longest + "n", std::string("a b"), std::string("a\nOK"),
                                 std::string("a\0b", 3), std::string("\xc3\xa4"), std::string("a#b")}) {
    INFO(bad);
    CHECK(registrar.Refused(bad, path, absl::StatusCode::kInvalidArgument).reason == "BAD_NAME");
    CHECK_FALSE(absl::StrContains(std::string(registrar.last_status().message()), "\n"));
  }
}

}  // namespace
}  // namespace residency
