// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/model_commands.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "client/ctl/dry_run_text.h"
#include "client/ctl/progress.h"
#include "client/ctl/report.h"
#include "client/grpc_status.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

// Giving back a large mirror and digesting a large model take seconds; a daemon that is stuck does not come back.
constexpr absl::Duration kLongCall = absl::Minutes(2);

struct RegisterFlags {
  std::string name;
  std::string source;
  std::vector<std::string> components;
  std::string device_uuid;
  std::optional<uint64_t> device_budget;
  bool phased = false;
  std::string pin;   // empty: the daemon's
  std::string tier;  // the same
  bool activate = false;
  bool dry_run = false;
};

struct ActivateFlags {
  std::string name;
  std::optional<uint64_t> device_budget;
  std::optional<absl::Duration> deadline;
  bool skip_verification = false;
};

struct DeactivateFlags {
  std::string name;
  std::optional<absl::Duration> drain;
};

absl::StatusOr<std::unique_ptr<Client>> Connect(const GlobalFlags& flags) {
  return Client::Connect({flags.runtime_dir, "residencyctl", flags.timeout});
}

void Bound(grpc::ClientContext& context, absl::Duration duration) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + duration));
}

void SetDuration(google::protobuf::Duration& proto, absl::Duration duration) {
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
}

// The daemon's working directory is another one. A trailing slash is dropped, which lexically_normal keeps.
std::string AbsolutePath(const std::string& path) {
  if (path.empty()) return path;
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) return path;
  std::string text = absolute.lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

std::string Rate(uint64_t bytes, double seconds) {
  if (seconds <= 0) return "";
  return absl::StrCat(" (", FormatBytes(static_cast<uint64_t>(static_cast<double>(bytes) / seconds)), "/s)");
}

// N=PATH or N=PATH#GLOB.
absl::StatusOr<v1::ComponentSource> ParseComponent(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == 0 || equals == std::string::npos || equals + 1 == text.size()) {
    return Refuse(absl::StatusCode::kInvalidArgument, "BAD_COMPONENT",
                  absl::StrCat("--component '", text, "' is not NAME=PATH or NAME=PATH#GLOB"));
  }
  v1::ComponentSource component;
  component.set_name(text.substr(0, equals));
  const std::string rest = text.substr(equals + 1);
  const size_t hash = rest.find('#');
  component.set_path(AbsolutePath(rest.substr(0, hash)));
  if (hash != std::string::npos) component.set_glob(rest.substr(hash + 1));
  return component;
}

// What there was a last answer about is done, whatever `status` then says of its activation.
struct Registered {
  v1::RegisterModelResponse response;
  absl::Status status;
};

Registered CallRegister(Client& client, const v1::RegisterModelRequest& request) {
  grpc::ClientContext context;
  const auto stream = client.service().RegisterModel(&context, request);
  Registered registered;
  ProgressBar bar;
  while (stream->Read(&registered.response)) {
    bar.Update(registered.response.bytes_done(), registered.response.bytes_total(), registered.response.pinned_bytes());
  }
  registered.status = FromGrpcStatus(stream->Finish());
  if (registered.status.ok() && !registered.response.done()) {
    registered.status = absl::InternalError("the daemon ended the registration without an outcome");
  }
  return registered;
}

std::string ActivatedText(const std::string& name, const v1::ActivateResponse& response) {
  std::string text = absl::StrFormat("activated %s on %s: ", name, response.device_uuid());
  if (response.bytes_moved() == 0 && response.mode() == v1::MODEL_MODE_PHASED) {
    absl::StrAppend(&text, "phased, so its components come with their phases");
  } else if (response.bytes_moved() == 0) {
    absl::StrAppend(&text, "0 bytes moved, it was there");
  } else {
    absl::StrAppendFormat(&text, "%s moved in %.3f s%s, ", FormatBytes(response.bytes_moved()), response.seconds(),
                          Rate(response.bytes_moved(), response.seconds()));
    // What the daemon did, rather than what it was asked for.
    absl::StrAppend(&text, response.verified_cells() == 0
                               ? "not verified"
                               : absl::StrFormat("%d cells verified", response.verified_cells()));
  }
  if (response.refilled_cells() > 0) absl::StrAppendFormat(&text, ", %d refilled", response.refilled_cells());
  if (response.trusted_cells() > 0) {
    absl::StrAppendFormat(&text, ", %d for the first time, so trusted", response.trusted_cells());
  }
  absl::StrAppendFormat(&text, "; measured on the GPU %s\n", FormatBytes(response.device_bytes()));
  if (!response.evicted().empty()) {
    absl::StrAppend(&text, "made room: ", absl::StrJoin(response.evicted(), ", "), "\n");
  }
  return text;
}

int Register(const GlobalFlags& flags, const RegisterFlags& options) {
  v1::RegisterModelRequest request;
  request.set_name(options.name);
  request.set_source(AbsolutePath(options.source));
  request.set_device_uuid(options.device_uuid);
  if (options.device_budget.has_value()) request.mutable_budget()->set_device_bytes(*options.device_budget);
  request.set_mode(options.phased ? v1::MODEL_MODE_PHASED : v1::MODEL_MODE_HELD);
  if (options.pin == "auto") request.set_pin(v1::PIN_POLICY_AUTO);
  if (options.pin == "yes") request.set_pin(v1::PIN_POLICY_YES);
  if (options.pin == "no") request.set_pin(v1::PIN_POLICY_NO);
  if (options.tier == "mirror") request.set_host_tier(v1::HOST_TIER_MIRROR);
  if (options.tier == "file") request.set_host_tier(v1::HOST_TIER_FILE);
  request.set_activate(options.activate);
  request.set_dry_run(options.dry_run);
  for (const std::string& text : options.components) {
    auto component = ParseComponent(text);
    if (!component.ok()) {
      ReportError(flags, component.status());
      return kExitUsage;
    }
    *request.add_components() = *std::move(component);
  }
  auto client = Connect(flags);
  if (!client.ok()) return ReportError(flags, client.status());
  const auto [response, status] = CallRegister(**client, request);
  if (!response.done()) return ReportError(flags, status);
  if (options.dry_run) return ReportDone(flags, response.dry_run(), DryRunText(options.name, response.dry_run()));
  std::string text =
      absl::StrFormat("registered %s on %s: %d tensors, payload %s, tax %s, pinned %s, in %.3f s%s\n%s\n", options.name,
                      response.device_uuid(), response.tensors(), FormatBytes(response.payload_bytes()),
                      FormatBytes(response.tax_bytes()), FormatBytes(response.pinned_bytes()), response.seconds(),
                      Rate(response.payload_bytes(), response.seconds()), response.pin().message());
  if (!status.ok()) {
    absl::StrAppend(&text, options.name, " is registered, but not activated\n");
    return ReportHalfDone(flags, response, text, "registered", status);
  }
  if (response.has_activation()) absl::StrAppend(&text, ActivatedText(options.name, response.activation()));
  return ReportDone(flags, response, text);
}

int Activate(const GlobalFlags& flags, const ActivateFlags& options) {
  auto client = Connect(flags);
  if (!client.ok()) return ReportError(flags, client.status());
  v1::ActivateRequest request;
  request.set_model(options.name);
  if (options.device_budget.has_value()) request.mutable_budget()->set_device_bytes(*options.device_budget);
  request.set_skip_verification(options.skip_verification);
  grpc::ClientContext context;
  if (options.deadline.has_value()) {
    SetDuration(*request.mutable_deadline(), *options.deadline);
    // The daemon answers first, and says more.
    Bound(context, *options.deadline + flags.timeout);
  }
  v1::ActivateResponse response;
  absl::Status status;
  {
    const Spinner spinner(absl::StrCat("activating ", options.name));
    status = FromGrpcStatus((*client)->service().Activate(&context, request, &response));
  }
  if (!status.ok()) return ReportError(flags, status);
  return ReportDone(flags, response, ActivatedText(options.name, response));
}

int Deactivate(const GlobalFlags& flags, const DeactivateFlags& options) {
  auto client = Connect(flags);
  if (!client.ok()) return ReportError(flags, client.status());
  v1::DeactivateRequest request;
  request.set_model(options.name);
  if (options.drain.has_value()) SetDuration(*request.mutable_drain(), *options.drain);
  grpc::ClientContext context;
  Bound(context, options.drain.value_or(absl::ZeroDuration()) + kLongCall);
  v1::DeactivateResponse response;
  const auto status = [&] {
    const Spinner spinner(absl::StrCat("deactivating ", options.name));
    return FromGrpcStatus((*client)->service().Deactivate(&context, request, &response));
  }();
  if (!status.ok()) return ReportError(flags, status);
  return ReportDone(flags, response,
                    absl::StrFormat("deactivated %s in %.3f s: %s to the pool, %s to the driver, %s copied\n",
                                    options.name, response.seconds(), FormatBytes(response.pooled_bytes()),
                                    response.has_freed_bytes() ? FormatBytes(response.freed_bytes()) : "unknown",
                                    FormatBytes(response.copied_bytes())));
}

int Unload(const GlobalFlags& flags, const std::string& name) {
  auto client = Connect(flags);
  if (!client.ok()) return ReportError(flags, client.status());
  v1::UnloadModelRequest request;
  request.set_model(name);
  grpc::ClientContext context;
  Bound(context, std::max(flags.timeout, kLongCall));
  v1::UnloadModelResponse response;
  const auto status = [&] {
    const Spinner spinner(absl::StrCat("unloading ", name));
    return FromGrpcStatus((*client)->service().UnloadModel(&context, request, &response));
  }();
  if (!status.ok()) return ReportError(flags, status);
  return ReportDone(flags, response,
                    absl::StrFormat("unloaded %s: %s of host memory and %s of device memory given back\n", name,
                                    FormatBytes(response.host_bytes()), FormatBytes(response.device_bytes())));
}

int Verify(const GlobalFlags& flags, const std::string& name) {
  auto client = Connect(flags);
  if (!client.ok()) return ReportError(flags, client.status());
  v1::VerifyRequest request;
  request.set_model(name);
  grpc::ClientContext context;
  Bound(context, std::max(flags.timeout, kLongCall));
  v1::VerifyResponse response;
  const auto status = [&] {
    const Spinner spinner(absl::StrCat("verifying ", name));
    return FromGrpcStatus((*client)->service().Verify(&context, request, &response));
  }();
  if (!status.ok()) return ReportError(flags, status);
  return ReportDone(flags, response,
                    absl::StrFormat("verified %s in %.3f s: %d cells right, %d refilled, %d not on the GPU\n", name,
                                    response.seconds(), response.verified_cells(), response.refilled_cells(),
                                    response.absent_cells()));
}

int Trim(const GlobalFlags& flags, const std::string& device_uuid) {
  auto client = Connect(flags);
  if (!client.ok()) return ReportError(flags, client.status());
  v1::TrimRequest request;
  request.set_device_uuid(device_uuid);
  grpc::ClientContext context;
  Bound(context, std::max(flags.timeout, kLongCall));
  v1::TrimResponse response;
  const auto status = [&] {
    const Spinner spinner("trimming");
    return FromGrpcStatus((*client)->service().Trim(&context, request, &response));
  }();
  if (!status.ok()) return ReportError(flags, status);
  std::string text;
  for (const v1::TrimmedDevice& device : response.devices()) {
    absl::StrAppendFormat(&text, "trimmed %s: %s out of the pool, %s more are free\n", device.device_uuid(),
                          FormatBytes(device.trimmed_bytes()), FormatBytes(device.freed_bytes()));
  }
  return ReportDone(flags, response, text);
}

// CLI11 writes into the flags when it parses, so they live as long as the command.
void AddRegister(CLI::App& app, const GlobalFlags& flags, Command& chosen) {
  auto options = std::make_shared<RegisterFlags>();
  CLI::App& command = *AddCommand(app, "register", "Reads a checkpoint into host memory",
                                  "residencyctl register flux /models/FLUX.1-dev --device_budget 24GiB", chosen,
                                  [&flags, options] { return Register(flags, *options); });
  command.add_option("NAME", options->name, "name of the model")->required();
  command.add_option(
      "SOURCE", options->source,
      "a safetensors file, an explicit table NAME.tensors.json, a directory with one file or shards with "
      "an index, or a pipeline directory with model_index.json");
  command
      .add_option(
          "--component", options->components,
          "a component by name from a file or folder of its own, or from the tensors of a file whose names match")
      ->type_name("N=PATH[#GLOB]")
      ->expected(1)
      ->take_all();
  command.add_option("--device", options->device_uuid, "the GPU; the daemon's first one if not given")
      ->type_name("UUID");
  AddBytes(command, "--device_budget", options->device_budget, "most that the model may hold on its GPU");
  command.add_flag("--phased", options->phased,
                   "one component is on the GPU at a time, for as long as a client is in its phase; room for the "
                   "largest one is enough");
  command
      .add_option("--pin", options->pin, "page-lock the host copy: auto where there is room; the daemon's if not given")
      ->type_name("auto|yes|no")
      ->check(CLI::IsMember({"auto", "yes", "no"}));
  command
      .add_option("--host_tier", options->tier,
                  "mirror, a copy in host memory, or file, the files themselves, mapped and page-locked, which nobody "
                  "may rewrite then; the daemon's if not given")
      ->type_name("mirror|file")
      ->check([](const std::string& text) -> std::string {
        if (text == "mirror" || text == "file") return "";
        return absl::StrCat("'", text, "': mirror or file", text == "none" ? "; none is not offered yet" : "");
      });
  CLI::Option* const activate = command.add_flag(
      "--activate", options->activate,
      "bring it onto its GPU too, without a lease, for which bytes flow there while the last ones are being read");
  command.add_flag("--dry_run", options->dry_run, "only say what it would take, what would fit, and which flags help")
      ->excludes(activate);
}

void AddActivate(CLI::App& app, const GlobalFlags& flags, Command& chosen) {
  auto options = std::make_shared<ActivateFlags>();
  CLI::App& command = *AddCommand(app, "activate", "Brings a model onto its GPU, without a lease",
                                  "residencyctl activate flux --deadline 30s", chosen,
                                  [&flags, options] { return Activate(flags, *options); });
  command.add_option("NAME", options->name, "name of the model")->required();
  AddBytes(command, "--device_budget", options->device_budget, "most that the model may hold on its GPU");
  AddDuration(command, "--deadline", options->deadline, "give up after this long");
  command.add_flag("--skip_verification", options->skip_verification,
                   "do not compare what comes with its source; verify does so at any later time");
}

void AddDeactivate(CLI::App& app, const GlobalFlags& flags, Command& chosen) {
  auto options = std::make_shared<DeactivateFlags>();
  CLI::App& command = *AddCommand(app, "deactivate", "Takes a model off its GPU; leases keep their addresses",
                                  "residencyctl deactivate flux --drain 10s", chosen,
                                  [&flags, options] { return Deactivate(flags, *options); });
  command.add_option("NAME", options->name, "name of the model")->required();
  AddDuration(command, "--drain", options->drain, "wait this long for leases in use; not at all if not given");
}

void AddNamed(CLI::App& app, const GlobalFlags& flags, Command& chosen, const std::string& name,
              const std::string& help, int (*run)(const GlobalFlags&, const std::string&)) {
  auto model = std::make_shared<std::string>();
  CLI::App& command = *AddCommand(app, name, help, absl::StrCat("residencyctl ", name, " flux"), chosen,
                                  [&flags, model, run] { return run(flags, *model); });
  command.add_option("NAME", *model, "name of the model")->required();
}

void AddTrim(CLI::App& app, const GlobalFlags& flags, Command& chosen) {
  auto device_uuid = std::make_shared<std::string>();
  CLI::App& command =
      *AddCommand(app, "trim", "Gives device memory that waits for the next model back to the driver",
                  "residencyctl trim", chosen, [&flags, device_uuid] { return Trim(flags, *device_uuid); });
  command.add_option("DEVICE", *device_uuid, "UUID of the GPU; all of the daemon's if not given");
}

}  // namespace

void AddModelCommands(CLI::App& app, const GlobalFlags& flags, Command& chosen) {
  AddRegister(app, flags, chosen);
  AddActivate(app, flags, chosen);
  AddDeactivate(app, flags, chosen);
  AddNamed(app, flags, chosen, "unload", "Forgets a model and gives back its memory", Unload);
  AddNamed(app, flags, chosen, "verify", "Digests every cell on the GPU and compares it with the host's", Verify);
  AddTrim(app, flags, chosen);
}

}  // namespace residency
