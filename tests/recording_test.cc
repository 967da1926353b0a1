// SPDX-License-Identifier: Apache-2.0
#include "daemon/recording.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"
#include "mechanisms/version.h"
#include "tests/arbiter_rig.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kCell = kMinCellBytes;

// ---- Files. ----

class TestFile {
 public:
  TestFile() : directory_(fs::temp_directory_path() / absl::StrCat("recording_test-", getpid())) {
    fs::create_directories(directory_);
  }
  ~TestFile() { fs::remove_all(directory_); }

  std::string path() const { return directory_ / "recording"; }
  void Write(const std::string& bytes) const { std::ofstream(path(), std::ios::binary) << bytes; }
  std::string Read() const {
    std::ifstream file(path(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  const fs::path directory_;
};

struct Replayed {
  absl::StatusOr<bool> same;
  std::string text;
};

Replayed ReplayOf(const TestFile& file) {
  std::ostringstream out;
  auto same = Replay(file.path(), out);
  return {std::move(same), out.str()};
}

// A core whose steps are recorded as the broker does it.
class RecordedCore {
 public:
  RecordedCore(const std::string& path, const ArbiterOptions& options)
      : recorder_(*Recorder::Create(path, kVersion, options)), arbiter_(options) {}

  void Step(const Event& event, const std::function<void(std::vector<Effect>&)>& change = nullptr) {
    now_ += absl::Milliseconds(10) + absl::Nanoseconds(1) / 4;
    recorder_->Begin(event, now_);
    std::vector<Effect> effects = arbiter_.Step(event, now_);
    if (change) change(effects);
    recorder_->End(effects);
    effects_ += effects.size();
    ++steps_;
  }
  Recorder& recorder() { return *recorder_; }
  std::string Verdict() const { return absl::StrCat(steps_, " steps, ", effects_, " effects: the same decisions\n"); }

 private:
  std::unique_ptr<Recorder> recorder_;
  Arbiter arbiter_;
  absl::Time now_ = absl::UnixEpoch();
  size_t steps_ = 0;
  size_t effects_ = 0;
};

// Two models for room of one and a half: the second takes the first's, whose client holds on to it for a while.
std::vector<Event> Session() {
  constexpr uint64_t kTotal = 6 * kCell;
  constexpr DeviceId kDevice{1};
  const ModelId a{1};
  const ModelId b{2};
  const SessionId session{7};
  const DeviceMeasured empty{.device = kDevice, .total_bytes = kTotal, .free_bytes = kTotal};
  const DeviceMeasured taken{
      .device = kDevice, .total_bytes = kTotal, .free_bytes = 2 * kCell, .broker_bytes = 4 * kCell};
  const PlanRealized on{.device_bytes = 4 * kCell, .copied_bytes = 4 * kCell, .verified_cells = 4};
  const auto realized = [](PlanRealized event, ModelId model) {
    event.model = model;
    return event;
  };
  return {
      SessionOpened{session, 4711, 1000, "a client"},
      RegisterRequested{RequestId{1}, "a", "files of a", kDevice, Budget{}, ArbiterRig::LayoutOf(4 * kCell)},
      MirrorsBuilt{a, absl::OkStatus(), 4 * kCell},
      RegisterRequested{RequestId{2}, "b", "files of b", kDevice, Budget{}, ArbiterRig::LayoutOf(4 * kCell)},
      MirrorsBuilt{b, absl::OkStatus(), 4 * kCell},
      RegisterRequested{RequestId{3}, "b", "other files", kDevice, Budget{}, ArbiterRig::LayoutOf(kCell)},
      ActivateRequested{
          .request = RequestId{4}, .name = "a", .session = session, .deadline = absl::UnixEpoch() + absl::Hours(1)},
      empty,
      realized(on, a),
      LeaseMapped{LeaseId{1}, 1},
      ActivateRequested{.request = RequestId{5}, .name = "b"},
      taken,
      UseWordsClosed{a, {LeaseId{1}}},
      ActivateRequested{.request = RequestId{6}, .name = "b"},
      taken,
      UseWordsClosed{a, {}},
      LeaseReleased{LeaseId{1}, 1},
      PlanRealized{.model = a, .unmapped_bytes = 4 * kCell, .pooled_bytes = 4 * kCell},
      empty,
      realized(on, b),
      DeactivateRequested{RequestId{7}, "nobody", absl::Seconds(1)},
      SessionEnded{session},
  };
}

ArbiterOptions Options() {
  return {.devices = {{.id = DeviceId{1}, .uuid = "GPU-test", .budget_bytes = 6 * kCell}},
          .host_budget_bytes = 100 * kCell};
}

// ---- Tests. ----

TEST_CASE("A recorded session is decided the same again") {
  const TestFile file;
  RecordedCore core(file.path(), Options());
  for (const Event& event : Session()) core.Step(event);
  const Replayed replayed = ReplayOf(file);
  INFO(replayed.text);
  REQUIRE(replayed.same.ok());
  CHECK(*replayed.same);
  CHECK(replayed.text == core.Verdict());
  CHECK(replayed.text.substr(0, 9) == "22 steps,");
}

TEST_CASE("The first step that is decided differently is told with both sides") {
  const TestFile file;
  RecordedCore core(file.path(), Options());
  const std::vector<Event> events = Session();
  for (size_t i = 0; i < events.size(); ++i) {
    core.Step(events[i], [&](std::vector<Effect>& effects) {
      // As if the core of then had decided otherwise, twice.
      if (i == 8) effects.push_back(TrimPool{DeviceId{77}});
      if (i == 7)
        std::erase_if(effects, [](const Effect& effect) { return std::holds_alternative<GrantLease>(effect); });
    });
  }
  const Replayed replayed = ReplayOf(file);
  INFO(replayed.text);
  REQUIRE(replayed.same.ok());
  CHECK_FALSE(*replayed.same);
  CHECK(absl::StartsWith(replayed.text, "step 8 was decided differently: "));
  CHECK(absl::StrContains(replayed.text, "now:      grant_lease { lease: 1 session: 7 model: 1 }"));
  CHECK_FALSE(absl::StrContains(replayed.text, "77"));
}

TEST_CASE("A recording that is cut off anywhere is decided the same as far as it goes") {
  const TestFile file;
  {
    RecordedCore core(file.path(), Options());
    const std::vector<Event> events = Session();
    for (size_t i = 0; i < 8; ++i) core.Step(events[i]);
  }
  const std::string whole = file.Read();
  // The length of the header, which has less than 128 bytes, and itself.
  const size_t header_bytes = 1 + static_cast<unsigned char>(whole.at(0));
  REQUIRE(header_bytes < 129);
  for (size_t length = whole.size(); length-- > 0;) {
    fs::resize_file(file.path(), length);
    const Replayed replayed = ReplayOf(file);
    INFO(length << " of " << whole.size() << " bytes: " << replayed.text);
    if (length < header_bytes) {
      REQUIRE_FALSE(replayed.same.ok());
      REQUIRE(ReasonOf(replayed.same.status()) == "NOT_A_RECORDING");
    } else {
      REQUIRE(replayed.same.ok());
      REQUIRE(*replayed.same);
      REQUIRE(absl::EndsWith(replayed.text, "the same decisions\n"));
    }
  }
}

TEST_CASE("A step that the daemon died in is told and taken") {
  const TestFile file;
  RecordedCore core(file.path(), Options());
  core.Step(SessionOpened{SessionId{1}, 1, 1, "c"});
  core.recorder().Begin(DeactivateRequested{RequestId{1}, "flux", absl::ZeroDuration()},
                        absl::UnixEpoch() + absl::Hours(1));
  const Replayed replayed = ReplayOf(file);
  REQUIRE(replayed.same.ok());
  CHECK(*replayed.same);
  CHECK(absl::StartsWith(replayed.text, "step 2 has no effects, the daemon ended in it: "));
  CHECK(absl::StrContains(replayed.text, "deactivate_requested { request: 1 name: \"flux\""));
  CHECK(absl::EndsWith(replayed.text, core.Verdict()));
}

TEST_CASE("What is no recording is refused by name") {
  const TestFile file;
  std::string reason = "NOT_A_RECORDING";
  SECTION("nothing in it") { file.Write(""); }
  SECTION("text") { file.Write("# residencyd\nsome text that goes on for a while\n"); }
  SECTION("lengths without an end") { file.Write(std::string(100, '\xff')); }
  SECTION("zeros") { file.Write(std::string(100, '\0')); }
  SECTION("a header of another format") {
    recording::v1::Record record;
    record.mutable_header()->set_magic("residencyd recording");
    record.mutable_header()->set_format_version(2);
    const std::string bytes = record.SerializeAsString();
    file.Write(std::string(1, static_cast<char>(bytes.size())) + bytes);
  }
  SECTION("a recording with something else in its middle") {
    RecordedCore core(file.path(), Options());
    core.Step(SessionOpened{SessionId{1}, 1, 1, "c"});
    file.Write(file.Read() + "\x03garbage that goes on for a while");
    reason = "DAMAGED";
  }
  SECTION("a recording without one of its steps") {
    RecordedCore core(file.path(), Options());
    core.recorder().End({});
    reason = "DAMAGED";
  }
  SECTION("a folder") {
    fs::create_directory(file.path());
    reason = "";
  }
  SECTION("nothing of that name") { reason = ""; }
  const Replayed replayed = ReplayOf(file);
  REQUIRE_FALSE(replayed.same.ok());
  INFO(replayed.same.status());
  CHECK(ReasonOf(replayed.same.status()) == reason);
  CHECK(absl::StrContains(replayed.same.status().message(), file.path()));
}

TEST_CASE("A recording is a new file, for its owner alone") {
  const TestFile file;
  {
    const auto recorder = Recorder::Create(file.path(), kVersion, Options());
    REQUIRE(recorder.ok());
    struct stat about {};
    REQUIRE(stat(file.path().c_str(), &about) == 0);
    CHECK((about.st_mode & 0777) == 0600);
  }
  const std::string before = file.Read();
  const auto again = Recorder::Create(file.path(), kVersion, Options());
  REQUIRE_FALSE(again.ok());
  CHECK(again.status().code() == absl::StatusCode::kAlreadyExists);
  CHECK(ReasonOf(again.status()) == "FILE_EXISTS");
  CHECK(absl::StrContains(again.status().message(), file.path()));
  CHECK(file.Read() == before);

  const auto nowhere = Recorder::Create(file.path() + "/no/such", kVersion, Options());
  REQUIRE_FALSE(nowhere.ok());
  CHECK(absl::StrContains(nowhere.status().message(), file.path() + "/no/such"));
}

TEST_CASE("A disk without room ends the recording with whole records, and nothing else") {
  const TestFile file;
  RecordedCore core(file.path(), Options());
  core.Step(SessionOpened{SessionId{1}, 1, 1, "c"});
  const std::string verdict = core.Verdict();
  const std::string before = file.Read();

  // A limit on a file's size is met as a full disk is: by a short write, then none.
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const rlimit small{before.size() + 3, limit.rlim_max};
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  core.Step(SessionOpened{SessionId{2}, 2, 2, "another"});
  setrlimit(RLIMIT_FSIZE, &limit);
  signal(SIGXFSZ, handler);

  CHECK_FALSE(core.recorder().status().ok());
  CHECK(absl::StrContains(core.recorder().status().message(), file.path()));
  core.Step(SessionOpened{SessionId{3}, 3, 3, "a third"});
  CHECK(file.Read() == before);
  const Replayed replayed = ReplayOf(file);
  REQUIRE(replayed.same.ok());
  CHECK(*replayed.same);
  CHECK(replayed.text == verdict);
}

}  // namespace
}  // namespace residency
