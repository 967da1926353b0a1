// SPDX-License-Identifier: Apache-2.0
//
// A GPU that fails, or cannot do what is needed: what the simulated driver injects is said on the command line. A real
// card is not made to fail.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/daemon_rig.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

// Watches grpc.health.v1.Health by its bytes, as any monitor would: field 1 of an answer is 1 for SERVING, 2 for
// NOT_SERVING.
class HealthWatch {
 public:
  explicit HealthWatch(const DaemonRig& rig)
      : stub_(grpc::CreateChannel(absl::StrCat("unix:", rig.runtime_dir(), "/grpc.sock"),
                                  grpc::InsecureChannelCredentials())),
        call_(stub_.PrepareCall(&context_, "/grpc.health.v1.Health/Watch", &queue_)) {
    call_->StartCall(nullptr);
    AwaitDone();
    const grpc::Slice empty;
    call_->Write(grpc::ByteBuffer(&empty, 1), nullptr);
    AwaitDone();
  }
  ~HealthWatch() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  // The next answer; nothing where the call ended, or none came in time.
  std::string Next() {
    call_->Read(&answer_, nullptr);
    grpc::Slice slice;
    if (!AwaitDone() || !answer_.TrySingleSlice(&slice).ok()) return "";
    return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
  }

 private:
  bool AwaitDone() {
    void* tag = nullptr;
    bool ok = false;
    const auto deadline = absl::ToChronoTime(absl::Now() + kPatience);
    return queue_.AsyncNext(&tag, &ok, deadline) == grpc::CompletionQueue::GOT_EVENT && ok;
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  grpc::ByteBuffer answer_;
};

std::vector<std::string> Faults(const std::string& spec) { return {"--sim_faults", spec}; }

// Asks until the daemon has ended; every answer must be the same refusal.
void CheckEndsLost(DaemonRig& rig, absl::Time lost_at, const std::vector<std::string>& asks) {
  while (!rig.daemon().EndsWithin(absl::Milliseconds(1)) && absl::Now() < lost_at + absl::Seconds(10)) {
    const Outcome outcome = rig.Ctl(asks);
    INFO(outcome.output << outcome.errors);
    // 3: there is nobody to ask any more.
    CHECK((outcome.exit_status == 1 || outcome.exit_status == 3));
    if (outcome.exit_status == 1) CHECK(absl::StrContains(outcome.errors, "UNAVAILABLE/DEVICE_LOST"));
  }
  CHECK(rig.daemon().Wait(absl::Seconds(10)) == 1);
  CHECK(absl::Now() - lost_at < absl::Seconds(5));
  CHECK(absl::StrContains(rig.daemon().Errors(), "a GPU's context is lost"));
}

TEST_CASE(
    "A sticky error of a copy, a wait or a launch ends the daemon at once, and no call is answered well after it") {
  // The first copies, waits and launches are those of the probe and of reading the model's first bytes.
  const auto [call, error] = GENERATE(table<std::string, std::string>({{"cuMemcpyHtoDAsync@3", "ILLEGAL_ADDRESS"},
                                                                       {"cuStreamSynchronize@3", "LAUNCH_FAILED"},
                                                                       {"cuLaunchKernel@1", "UNKNOWN"}}));
  INFO(call);
  DaemonRig rig(Faults(absl::StrCat(call, "=", error)));
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  const auto watcher = rig.StartCtl({"status", "--watch", "--json"});
  watcher->ReadLine();
  HealthWatch health(rig);
  CHECK(health.Next() == "\x08\x01");
  const absl::Time start = absl::Now();
  const Json refused = rig.Refused({"activate", "flux"});
  CHECK(refused.at("code") == "UNAVAILABLE");
  CHECK(refused.at("reason") == "DEVICE_LOST");
  CHECK(absl::StrContains(refused.at("message").get<std::string>(), call.substr(0, call.find('@'))));
  const absl::Time refused_at = absl::Now();
  CHECK(health.Next() == "\x08\x02");
  CHECK(absl::Now() - refused_at < absl::Seconds(1));
  CheckEndsLost(rig, start, {"status"});
  CHECK(watcher->Wait(absl::Seconds(5)) == 1);
  INFO(watcher->Errors());
  CHECK(absl::StrContains(watcher->Errors(), "DEVICE_LOST"));
}

TEST_CASE("A sticky error that a status met first, or a call that nobody waits for, ends the daemon as well") {
  const auto [fault, asks] = GENERATE(table<std::string, std::vector<std::string>>(
      {{"cuMemGetInfo@3=ECC_UNCORRECTABLE", {"status"}},
       // Given back after a second, or by the question what lies where.
       {"cuMemRelease@12=LAUNCH_FAILED", {"activate flux", "deactivate flux"}}}));
  INFO(fault);
  std::vector<std::string> flags = Faults(fault);
  flags.insert(flags.end(), {"--pool_idle", "1s"});
  DaemonRig rig(flags);
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  bool refused = false;
  while (!rig.daemon().EndsWithin(absl::ZeroDuration()) && absl::Now() < deadline) {
    for (const std::string& ask : asks) {
      const Outcome outcome = rig.Ctl(absl::StrSplit(ask, ' '));
      INFO(ask << ": " << outcome.errors);
      if (outcome.exit_status == 1) CHECK(absl::StrContains(outcome.errors, "UNAVAILABLE/DEVICE_LOST"));
      // Once one is refused, none is answered well.
      if (refused) CHECK(outcome.exit_status != 0);
      refused |= outcome.exit_status != 0;
    }
  }
  CHECK(rig.daemon().Wait(absl::Seconds(5)) == 1);
}

TEST_CASE("A lost GPU whose driver does not return from its calls does not keep the daemon") {
  DaemonRig rig(Faults("cuMemcpyHtoDAsync@3=ILLEGAL_ADDRESS,cuMemUnmap@2=+60s,cuMemGetInfo@5=+60s"));
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  const absl::Time start = absl::Now();
  const Outcome outcome = rig.Ctl({"activate", "flux"});
  CHECK(outcome.exit_status != 0);
  CHECK(rig.daemon().Wait(absl::Seconds(10)) == 1);
  CHECK(absl::Now() - start < absl::Seconds(5));
}

TEST_CASE("A GPU without memory management registers models and says at every activation why it has none") {
  const auto [faults, step] = GENERATE(table<std::string, std::string>(
      {{"attr:VMM=0", "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED (801)"},
       {"cuMemCreate=NOT_SUPPORTED", "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED (801)"},
       {"cuMemSetAccess=NOT_SUPPORTED", "cuMemSetAccess: CUDA_ERROR_NOT_SUPPORTED (801)"}}));
  INFO(faults);
  DaemonRig rig(Faults(faults));
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  for (const char* command : {"activate", "attach", "activate"}) {
    const Json refused = rig.Refused({command, "flux"});
    CHECK(refused.at("code") == "FAILED_PRECONDITION");
    CHECK(refused.at("reason") == "NO_VMM");
    CHECK(absl::StrContains(refused.at("message").get<std::string>(), step));
  }
  CHECK(rig.Refused({"verify", "flux"}).at("reason") == "NOT_ACTIVE");
  const Json model = rig.Model("flux");
  CHECK(model.at("state") == "inactive");
  CHECK(model.at("device_bytes") == 0);
  CHECK(rig.Device().at("state") == "online");
  rig.Do({"unload", "flux"});

  TestProcess doctor({"/usr/bin/env", absl::StrCat("RESIDENCY_SIM_FAULTS=", faults), ProgramPath("residencyctl"),
                      "--runtime_dir", rig.runtime_dir(), "doctor", "--driver", "sim"},
                     rig.Path("doctor"));
  const std::string output = doctor.ReadAll();
  INFO(output);
  CHECK(doctor.Wait() == 1);
  CHECK(absl::StrContains(output, "NO_VMM"));
  CHECK(absl::StrContains(output, step));
}

TEST_CASE("A GPU whose memory cannot be exported is told apart from one without memory management") {
  const std::string faults = GENERATE("attr:POSIX_FD=0", "cuMemExportToShareableHandle=NOT_SUPPORTED");
  INFO(faults);
  DaemonRig rig(Faults(faults));
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  const Json refused = rig.Refused({"attach", "flux"});
  CHECK(refused.at("code") == "FAILED_PRECONDITION");
  CHECK(refused.at("reason") == "NO_EXPORT");
}

}  // namespace
}  // namespace residency
