// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_nvml.h"

#include <map>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "mechanisms/sim_calls.h"

namespace residency {
namespace {

NvmlResult Init() { return TheSimProcess() == nullptr ? kNvmlUninitialized : kNvmlSuccess; }

const char* ErrorString(NvmlResult result) {
  switch (result) {
    case kNvmlSuccess:
      return "Success";
    case kNvmlUninitialized:
      return "Uninitialized";
    case kNvmlInvalidArgument:
      return "Invalid Argument";
    case kNvmlNotSupported:
      return "Not Supported";
    case kNvmlNotFound:
      return "Not Found";
    case kNvmlInsufficientSize:
      return "Insufficient Size";
    case kNvmlUnknown:
      break;
  }
  return "Unknown Error";
}

NvmlResult HandleByUuid(const char* uuid, NvmlDevice* device) {
  SimProcess* process = TheSimProcess();
  if (process == nullptr) return kNvmlUninitialized;
  const std::string digits = absl::StrReplaceAll(absl::StripPrefix(uuid, "GPU-"), {{"-", ""}});
  for (size_t i = 0; i < process->cards->size(); ++i) {
    SimCard& card = process->cards->card(i);
    const absl::string_view bytes(reinterpret_cast<const char*>(card.uuid().data()), card.uuid().size());
    if (absl::BytesToHexString(bytes) != digits) continue;
    *device = reinterpret_cast<NvmlDevice>(&card);
    return kNvmlSuccess;
  }
  return kNvmlNotFound;
}

NvmlResult ComputeProcesses(NvmlDevice device, unsigned int* count, NvmlProcessInfo* processes) {
  SimProcess* process = TheSimProcess();
  if (process == nullptr) return kNvmlUninitialized;
  if (process->faults->Attribute("NVML").value_or(1) == 0) return kNvmlNotSupported;
  const auto usage = reinterpret_cast<SimCard*>(device)->UsedByProcess();
  if (!usage.ok()) return kNvmlUnknown;
  const unsigned int room = *count;
  *count = static_cast<unsigned int>(usage->size());
  if (*count > room) return kNvmlInsufficientSize;
  for (const auto& [pid, bytes] : *usage) *processes++ = {static_cast<unsigned int>(pid), bytes, ~0U, ~0U};
  return kNvmlSuccess;
}

NvmlResult GraphicsProcesses(NvmlDevice, unsigned int* count, NvmlProcessInfo*) {
  if (TheSimProcess() == nullptr) return kNvmlUninitialized;
  *count = 0;
  return kNvmlSuccess;
}

}  // namespace

Nvml SimNvml() { return {Init, ErrorString, HandleByUuid, ComputeProcesses, GraphicsProcesses}; }

}  // namespace residency
