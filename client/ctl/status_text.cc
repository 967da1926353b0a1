// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/status_text.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

// MODEL_STATE_ACTIVE as "active".
std::string Word(const std::string& enum_name, std::string_view prefix) {
  if (!enum_name.starts_with(prefix)) return absl::AsciiStrToLower(enum_name);
  return absl::AsciiStrToLower(enum_name.substr(prefix.size()));
}

void AppendDaemon(std::string& out, const v1::DaemonStatus& daemon) {
  absl::StrAppendFormat(&out, "residencyd %s  pid %d  driver %s  up %s  %s\n", daemon.version(), daemon.pid(),
                        daemon.driver(), AgeText(daemon.uptime_seconds()),
                        daemon.serving() ? "serving" : "NOT SERVING");
  if (daemon.oldest_transition_seconds() > 0) {
    absl::StrAppendFormat(&out, "  a transition has been under way for %s\n",
                          AgeText(daemon.oldest_transition_seconds()));
  }
}

void AppendHost(std::string& out, const v1::HostStatus& host) {
  absl::StrAppend(&out, "host memory: ", FormatBytes(host.pinned_bytes()), " pinned");
  if (host.page_cache_bytes() > 0) {
    absl::StrAppend(&out, " (", FormatBytes(host.page_cache_bytes()), " of it weight files' page cache)");
  }
  if (host.pageable_bytes() > 0) absl::StrAppend(&out, ", ", FormatBytes(host.pageable_bytes()), " pageable");
  if (host.has_budget_bytes()) absl::StrAppend(&out, " of ", FormatBytes(host.budget_bytes()));
  if (host.has_pin_limit_bytes()) {
    absl::StrAppendFormat(&out, "\n  at most %s can be pinned (%s)", FormatBytes(host.pin_limit_bytes()),
                          Word(v1::PinLimitSource_Name(host.pin_limit_source()), "PIN_LIMIT_SOURCE_"));
  }
  absl::StrAppend(&out, "\n");
}

void AppendDevice(std::string& out, const v1::DeviceStatus& device) {
  absl::StrAppendFormat(&out, "\n%s  %s  %s\n", device.uuid(), device.name(),
                        Word(v1::DeviceState_Name(device.state()), "DEVICE_STATE_"));
  absl::StrAppendFormat(&out, "  %11s %11s %11s %11s %11s %11s\n", "broker", "pool", "contexts", "others", "free",
                        "total");
  absl::StrAppendFormat(
      &out, "  %11s %11s %11s %11s %11s %11s\n", FormatBytes(device.broker_bytes()),
      FormatBytes(device.pool_idle_bytes()), (device.has_contexts_bytes() ? FormatBytes(device.contexts_bytes()) : "?"),
      FormatBytes(device.others_bytes()), FormatBytes(device.free_bytes()), FormatBytes(device.total_bytes()));
  absl::StrAppendFormat(&out, "  budget %s, reserve %s", FormatBytes(device.budget_bytes()),
                        FormatBytes(device.reserve_bytes()));
  if (device.working_bytes() > 0) {
    absl::StrAppendFormat(&out, ", stated working memory %s", FormatBytes(device.working_bytes()));
  }
  absl::StrAppend(&out, "\n");
  if (!device.not_measured().empty()) absl::StrAppend(&out, "  contexts in others: ", device.not_measured(), "\n");
  if (device.processes().empty()) return;
  absl::StrAppendFormat(&out, "  %7s %7s %-20s %11s\n", "pid", "uid", "process", "has");
  for (const v1::ProcessStatus& process : device.processes()) {
    absl::StrAppendFormat(&out, "  %7d %7s %-20s %11s\n", process.pid(),
                          process.has_uid() ? absl::StrCat(process.uid()) : "?",
                          process.client().empty() ? "(no client)" : process.client(), FormatBytes(process.bytes()));
  }
}

void AppendComponents(std::string& out, const v1::ModelStatus& model) {
  if (model.components().empty()) return;
  size_t width = 9;
  for (const v1::ComponentStatus& component : model.components()) width = std::max(width, component.name().size());
  absl::StrAppendFormat(&out, "  %-*s %8s %12s %13s %13s\n", width, "component", "tensors", "payload", "cells on GPU",
                        "bytes on GPU");
  for (const v1::ComponentStatus& component : model.components()) {
    absl::StrAppendFormat(&out, "  %-*s %8d %12s %13s %13s\n", width, component.name(), component.tensors(),
                          FormatBytes(component.payload_bytes()),
                          absl::StrCat(component.cells_on_gpu(), " of ", component.cells()),
                          FormatBytes(component.device_bytes()));
  }
}

void AppendLeases(std::string& out, const v1::ModelStatus& model) {
  if (model.leases().empty()) return;
  absl::StrAppendFormat(&out, "  %-5s %7s %-20s %-12s %-6s %11s %6s\n", "lease", "pid", "client", "state", "in use",
                        "mapped", "age");
  for (const v1::LeaseStatus& lease : model.leases()) {
    absl::StrAppendFormat(&out, "  %-5d %7d %-20s %-12s %-6s %11s %6s\n", lease.id(), lease.pid(), lease.client(),
                          Word(v1::LeaseState_Name(lease.state()), "LEASE_STATE_"), lease.in_use() ? "yes" : "no",
                          FormatBytes(lease.claimed_mapped_bytes()), AgeText(lease.age_seconds()));
    if (!lease.phase().empty()) absl::StrAppend(&out, "        in the phase of ", lease.phase(), "\n");
  }
}

void AppendClaim(std::string& out, const v1::ModelStatus& model) {
  absl::StrAppendFormat(&out, "  claimed %s, measured on the GPU %s\n", FormatBytes(model.claimed_device_bytes()),
                        FormatBytes(model.device_bytes()));
  // A phased model claims room for its largest component and fills it in its phases.
  const bool phased = model.mode() == v1::MODEL_MODE_PHASED && model.device_bytes() <= model.claimed_device_bytes();
  if (model.claimed_device_bytes() != model.device_bytes() && !phased) {
    absl::StrAppendFormat(&out, "  NOTE: claim and measurement differ: %d bytes claimed, %d measured\n",
                          model.claimed_device_bytes(), model.device_bytes());
  }
  absl::StrAppendFormat(&out, "  %d of %d components on the GPU", model.components_on_gpu(), model.components_size());
  if (model.components_partly_on_gpu() > 0)
    absl::StrAppendFormat(&out, ", %d partly", model.components_partly_on_gpu());
  absl::StrAppendFormat(&out, "; payload %s, tax %s, pinned %s\n", FormatBytes(model.payload_bytes()),
                        FormatBytes(model.tax_bytes()), FormatBytes(model.pinned_bytes()));
  if (model.host_tier() == v1::HOST_TIER_FILE) {
    absl::StrAppend(&out, "  host tier file: verified against the first activation\n");
  }
  if (model.has_pin() && !model.pin().pinned()) {
    absl::StrAppend(&out, "  host copy: ", model.pin().message(), "\n");
  }
  if (model.budget().has_device_bytes()) {
    absl::StrAppendFormat(&out, "  budget on the GPU %s\n", FormatBytes(model.budget().device_bytes()));
  }
}

void AppendHistory(std::string& out, const v1::ModelStatus& model) {
  if (model.has_last_activation()) {
    const v1::Activation& last = model.last_activation();
    absl::StrAppendFormat(&out, "  last activation: %s moved in %.3f s, %d cells verified", FormatBytes(last.bytes()),
                          last.seconds(), last.verified());
    if (last.trusted() > 0) absl::StrAppendFormat(&out, ", %d trusted", last.trusted());
    absl::StrAppend(&out, "\n");
  }
  if (model.has_last_error()) {
    const v1::LastError& error = model.last_error();
    absl::StrAppendFormat(&out, "  last error: %s/%s: %s\n", error.code(), error.reason(), error.message());
  }
}

// On a host whose memory is several nodes.
void AppendHostNodes(std::string& out, const v1::Status& status, const v1::ModelStatus& model) {
  if (model.host_nodes().empty()) return;
  const std::string nodes = absl::StrJoin(model.host_nodes(), ", ", [](std::string* text, const v1::NodeBytes& part) {
    absl::StrAppendFormat(text, "%s on node %d", FormatBytes(part.bytes()), part.node());
  });
  absl::StrAppend(&out, "  host memory: ", nodes);
  for (const v1::DeviceStatus& device : status.devices()) {
    if (device.uuid() != model.device_uuid() || !device.has_numa_node()) continue;
    absl::StrAppendFormat(&out, "; its GPU is near node %d", device.numa_node());
  }
  absl::StrAppend(&out, "\n");
  if (!model.host_not_placed().empty()) {
    absl::StrAppend(&out, "  NOTE: not placed near the GPU: ", model.host_not_placed(), "\n");
  }
}

void AppendModel(std::string& out, const v1::Status& status, const v1::ModelStatus& model) {
  absl::StrAppendFormat(&out, "\n%s  %s  %s  generation %d", model.name(),
                        Word(v1::ModelState_Name(model.state()), "MODEL_STATE_"),
                        Word(v1::ModelMode_Name(model.mode()), "MODEL_MODE_"), model.generation());
  // It may be on its way to the GPU already.
  const bool reading = model.state() == v1::MODEL_STATE_REGISTERING || model.progress() > 0;
  if (reading) absl::StrAppendFormat(&out, "  %.0f %%", model.progress() * 100);
  absl::StrAppend(&out, "\n");
  if (!model.device_uuid().empty()) absl::StrAppend(&out, "  on ", model.device_uuid(), "\n");
  AppendClaim(out, model);
  AppendHostNodes(out, status, model);
  AppendComponents(out, model);
  AppendLeases(out, model);
  AppendHistory(out, model);
}

}  // namespace

std::string AgeText(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  if (seconds < 10) return absl::StrFormat("%.1fs", seconds);
  if (whole < 60) return absl::StrFormat("%ds", whole);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  if (whole < 86400) return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
  return absl::StrFormat("%dd%02dh", whole / 86400, whole / 3600 % 24);
}

std::string StatusText(const v1::Status& status) {
  std::string out;
  AppendDaemon(out, status.daemon());
  AppendHost(out, status.host());
  for (const v1::DeviceStatus& device : status.devices()) AppendDevice(out, device);
  for (const v1::ModelStatus& model : status.models()) AppendModel(out, status, model);
  if (status.models().empty()) absl::StrAppend(&out, "\nno models\n");
  return out;
}

std::string TensorsText(const v1::ListTensorsResponse& table) {
  size_t name_width = 6;
  for (const v1::Tensor& tensor : table.tensors()) name_width = std::max(name_width, tensor.name().size());
  std::string out;
  int64_t component = -1;
  for (const v1::Tensor& tensor : table.tensors()) {
    if (component != tensor.component()) {
      component = tensor.component();
      const bool named = component < table.components_size();
      absl::StrAppend(&out, named ? table.components(static_cast<int>(component)) : "?", "\n");
    }
    absl::StrAppendFormat(&out, "  %-*s %-7s %11s  [%s]\n", name_width, tensor.name(), tensor.dtype(),
                          FormatBytes(tensor.bytes()), absl::StrJoin(tensor.shape(), ", "));
  }
  absl::StrAppendFormat(&out, "%d tensors, %s of addresses in cells of %s\n", table.tensors_size(),
                        FormatBytes(table.span_bytes()), FormatBytes(table.cell_bytes()));
  return out;
}

}  // namespace residency
