// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// A list may grow between the call that sizes it and the one that fills it.
constexpr int kTries = 4;
constexpr unsigned int kRoomAtFirst = 64;

absl::Status NoNvml(const std::string& why) { return Refuse(absl::StatusCode::kUnavailable, "NO_NVML", why); }

absl::Status Failed(const Nvml& nvml, const char* call, NvmlResult result) {
  const char* text = nvml.nvmlErrorString(result);
  return NoNvml(absl::StrCat(call, ": ", text == nullptr ? "unknown error" : text));
}

using ListProcesses = NvmlResult (*)(NvmlDevice, unsigned int*, NvmlProcessInfo*);

absl::StatusOr<std::vector<NvmlProcessInfo>> List(const Nvml& nvml, ListProcesses list, const char* call,
                                                  NvmlDevice device) {
  std::vector<NvmlProcessInfo> processes(kRoomAtFirst);
  NvmlResult result = kNvmlInsufficientSize;
  for (int i = 0; i < kTries && result == kNvmlInsufficientSize; ++i) {
    auto count = static_cast<unsigned int>(processes.size());
    result = list(device, &count, processes.data());
    processes.resize(result == kNvmlInsufficientSize ? 2 * std::max<size_t>(count, processes.size()) : count);
  }
  if (result != kNvmlSuccess) return Failed(nvml, call, result);
  return processes;
}

}  // namespace

absl::StatusOr<Nvml> LoadNvml() {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    return NoNvml(absl::StrCat("NVML does not open: ", error ? error : "libnvidia-ml.so.1"));
  }
  Nvml nvml;
  std::string missing;
  const auto load = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr && missing.empty()) missing = symbol;
  };
  load(nvml.nvmlInit, "nvmlInit_v2");
  load(nvml.nvmlErrorString, "nvmlErrorString");
  load(nvml.nvmlDeviceGetHandleByUUID, "nvmlDeviceGetHandleByUUID");
  load(nvml.nvmlDeviceGetComputeRunningProcesses, "nvmlDeviceGetComputeRunningProcesses_v3");
  load(nvml.nvmlDeviceGetGraphicsRunningProcesses, "nvmlDeviceGetGraphicsRunningProcesses_v3");
  if (!missing.empty()) return NoNvml(absl::StrCat("libnvidia-ml.so.1 has no function ", missing));
  if (const NvmlResult result = nvml.nvmlInit(); result != kNvmlSuccess) return Failed(nvml, "nvmlInit", result);
  return nvml;
}

absl::StatusOr<std::vector<ProcessMemory>> MeasureProcesses(const Nvml& nvml, const std::string& uuid, int64_t self) {
  NvmlDevice device = nullptr;
  if (const NvmlResult result = nvml.nvmlDeviceGetHandleByUUID(uuid.c_str(), &device); result != kNvmlSuccess) {
    return Failed(nvml, "nvmlDeviceGetHandleByUUID", result);
  }
  // A process that computes and draws stands in both lists, each time with all that it has; with MIG it has something
  // of each instance.
  std::map<std::pair<int64_t, uint64_t>, uint64_t> by_instance;
  const std::pair<ListProcesses, const char*> lists[] = {
      {nvml.nvmlDeviceGetComputeRunningProcesses, "nvmlDeviceGetComputeRunningProcesses"},
      {nvml.nvmlDeviceGetGraphicsRunningProcesses, "nvmlDeviceGetGraphicsRunningProcesses"}};
  for (const auto& [list, call] : lists) {
    const auto processes = List(nvml, list, call, device);
    if (!processes.ok()) return processes.status();
    for (const NvmlProcessInfo& process : *processes) {
      if (process.used_bytes == kNvmlNotAvailable) {
        return NoNvml(absl::StrCat("NVML does not tell what process ", process.pid, " has"));
      }
      const uint64_t instance = uint64_t{process.gpu_instance} << 32 | process.compute_instance;
      uint64_t& bytes = by_instance[{process.pid, instance}];
      bytes = std::max<uint64_t>(bytes, process.used_bytes);
    }
  }
  std::vector<ProcessMemory> measured;
  for (const auto& [key, bytes] : by_instance) {
    if (measured.empty() || measured.back().pid != key.first) measured.push_back({key.first, 0});
    measured.back().bytes += bytes;
  }
  const bool sees_self = std::any_of(measured.begin(), measured.end(),
                                     [self](const ProcessMemory& process) { return process.pid == self; });
  if (!sees_self) return NoNvml("NVML lists processes of another pid namespace, or none");
  return measured;
}

}  // namespace residency
