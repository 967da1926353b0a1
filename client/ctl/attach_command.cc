// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/attach_command.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "client/ctl/interruption.h"
#include "client/ctl/progress.h"
#include "client/ctl/proto_json.h"
#include "client/ctl/report.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

constexpr uint64_t kReadBytes = 64 * kMiB;

struct AttachFlags {
  std::string name;
  std::optional<uint64_t> device_budget;
  std::optional<uint64_t> working_bytes;
  std::optional<absl::Duration> deadline;
  std::optional<absl::Duration> hold;
  std::optional<absl::Duration> use;
  std::string phase;
  bool sha256 = false;
};

// The SHA-256 of a tensor as it lies on the device, in hexadecimal.
absl::StatusOr<std::string> Sha256(Lease& lease, const LeaseTensor& tensor, std::vector<uint8_t>& buffer) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  if (context == nullptr || EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) != 1) {
    return absl::InternalError("OpenSSL has no SHA-256");
  }
  for (uint64_t offset = 0; offset < tensor.bytes;) {
    const uint64_t bytes = std::min<uint64_t>(buffer.size(), tensor.bytes - offset);
    if (auto status = lease.Read(tensor, offset, {buffer.data(), bytes}); !status.ok()) return status;
    if (EVP_DigestUpdate(context.get(), buffer.data(), bytes) != 1) return absl::InternalError("SHA-256 failed");
    offset += bytes;
  }
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int digest_bytes = 0;
  if (EVP_DigestFinal_ex(context.get(), digest, &digest_bytes) != 1) return absl::InternalError("SHA-256 failed");
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), digest_bytes});
}

// The file's name of it, and its component's where another component has the same.
std::string ShownName(const Lease& lease, const LeaseTensor& tensor) {
  const bool unique = lease.Find(tensor.name) == &tensor;
  return unique ? tensor.name : absl::StrCat(tensor.component, "/", tensor.name);
}

nlohmann::ordered_json LeaseToJson(const Lease& lease) {
  return {{"lease_id", lease.id()},
          {"generation", lease.generation()},
          {"device_uuid", lease.device_uuid()},
          {"tensors", nlohmann::ordered_json::array()}};
}

// Hashes tensors inside one use, so that all are of one generation. Stops early at a signal.
absl::Status HashTensors(const GlobalFlags& flags, Lease& lease, std::span<const LeaseTensor> tensors,
                         absl::Time deadline, const Interruption& interruption, nlohmann::ordered_json& json) {
  const auto use = lease.Use({.deadline = deadline});
  if (!use.ok()) return use.status();
  uint64_t largest = 1;
  for (const LeaseTensor& tensor : tensors) largest = std::max(largest, tensor.bytes);
  std::vector<uint8_t> buffer(std::min(largest, kReadBytes));
  for (const LeaseTensor& tensor : tensors) {
    if (interruption.came()) return Refuse(absl::StatusCode::kCancelled, "INTERRUPTED", "not every tensor was hashed");
    auto digest = Sha256(lease, tensor, buffer);
    if (!digest.ok()) return digest.status();
    if (flags.json) {
      json["tensors"].push_back({{"name", tensor.name}, {"component", tensor.component}, {"sha256", *digest}});
    } else {
      std::fputs(absl::StrCat(*digest, "  ", ShownName(lease, tensor), "\n").c_str(), stdout);
    }
  }
  std::fflush(stdout);
  return absl::OkStatus();
}

// Begins the phase of `component` and says what it moved.
absl::StatusOr<Phase> BeginPhase(Lease& lease, const std::string& component, absl::Time deadline) {
  auto phase = lease.BeginPhase(component, {.deadline = deadline});
  if (!phase.ok()) return phase;
  std::fputs(absl::StrCat("phase ", component, ": ", phase->bytes_moved(), " bytes moved\n").c_str(), stderr);
  return phase;
}

// Hashes every tensor; those of a phased model component by component, each in its phase, or those of the phase that
// the caller is in.
absl::Status HashModel(const GlobalFlags& flags, Lease& lease, const std::string& current_phase, absl::Time deadline,
                       const Interruption& interruption, nlohmann::ordered_json& json) {
  const std::span<const LeaseTensor> tensors = lease.tensors();
  if (!lease.phased()) return HashTensors(flags, lease, tensors, deadline, interruption, json);
  for (size_t first = 0, end = 0; first < tensors.size(); first = end) {
    const std::string& component = tensors[first].component;
    while (end < tensors.size() && tensors[end].component == component) ++end;
    if (!current_phase.empty() && current_phase != component) continue;
    std::optional<Phase> phase;
    if (current_phase.empty()) {
      auto begun = BeginPhase(lease, component, deadline);
      if (!begun.ok()) return begun.status();
      phase.emplace(*std::move(begun));
    }
    const auto status = HashTensors(flags, lease, tensors.subspan(first, end - first), deadline, interruption, json);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// What is done with a lease that is mapped.
int KeepLease(const GlobalFlags& flags, const AttachFlags& options, Lease& lease, absl::Time deadline) {
  const absl::Time start = absl::Now();
  auto interruption = Interruption::Begin();
  if (!interruption.ok()) return ReportError(flags, interruption.status());
  if (lease.phased() && options.use.has_value() && options.phase.empty()) {
    return ReportError(flags, Refuse(absl::StatusCode::kInvalidArgument, "PHASE_NEEDED",
                                     absl::StrCat(options.name, " is phased: --use needs --phase COMPONENT")));
  }
  std::optional<Phase> phase;
  if (!options.phase.empty()) {
    auto begun = BeginPhase(lease, options.phase, deadline);
    if (!begun.ok()) return ReportError(flags, begun.status());
    phase.emplace(*std::move(begun));
  }
  std::fputs(absl::StrCat("attached lease ", lease.id(), " generation ", lease.generation(), "\n").c_str(), stderr);
  std::optional<Use> use;
  if (options.use.has_value()) {
    auto begun = lease.Use({.deadline = deadline});
    if (!begun.ok()) return ReportError(flags, begun.status());
    use.emplace(*std::move(begun));
  }
  nlohmann::ordered_json json = LeaseToJson(lease);
  if (options.sha256) {
    const auto status = HashModel(flags, lease, options.phase, deadline, **interruption, json);
    if (!status.ok()) return ReportError(flags, status);
  }
  if (flags.json) Print(absl::StrCat(JsonText(json), "\n"));
  if (use.has_value()) {
    (*interruption)->Wait(start + *options.use);
    use.reset();
  }
  if (options.hold.has_value()) {
    (*interruption)->Wait(start + *options.hold);
  } else {
    (*interruption)->WaitForInputEnd();
  }
  return kExitDone;
}

int Attach(const GlobalFlags& flags, const AttachFlags& options) {
  auto client = Client::Connect({flags.runtime_dir, "residencyctl attach", flags.timeout});
  if (!client.ok()) return ReportError(flags, client.status());
  ActivateOptions activate;
  activate.device_bytes = options.device_budget;
  activate.working_bytes = options.working_bytes.value_or(0);
  if (options.deadline.has_value()) activate.deadline = absl::Now() + *options.deadline;
  auto lease = [&] {
    const Spinner spinner(absl::StrCat("attaching ", options.name));
    return (*client)->Activate(options.name, activate);
  }();
  if (!lease.ok()) return ReportError(flags, lease.status());
  return KeepLease(flags, options, *lease, activate.deadline);
}

}  // namespace

void AddAttachCommand(CLI::App& app, const GlobalFlags& flags, Command& chosen) {
  auto options = std::make_shared<AttachFlags>();
  CLI::App& command = *AddCommand(app, "attach", "Takes a lease on a model and maps it, as a client process does",
                                  "residencyctl attach flux --sha256 < /dev/null > on-gpu.txt", chosen,
                                  [&flags, options] { return Attach(flags, *options); });
  command.add_option("NAME", options->name, "name of the model")->required();
  AddBytes(command, "--device_budget", options->device_budget, "most that the model may hold on its GPU");
  AddBytes(command, "--working_bytes", options->working_bytes, "stated need of memory beside the weights");
  AddDuration(command, "--deadline", options->deadline, "give up activating after this long");
  command.add_flag("--sha256", options->sha256, "print the SHA-256 of each tensor, read back from the device");
  AddDuration(command, "--hold", options->hold, "keep the lease this long; without it until standard input closes");
  AddDuration(command, "--use", options->use, "hold the lease in use this long, from the start");
  command
      .add_option("--phase", options->phase,
                  "of a phased model: bring this component on and stay in its phase; without "
                  "it --sha256 goes through the phases of all")
      ->type_name("COMPONENT");
}

}  // namespace residency
