// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/open_driver.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "mechanisms/cuda_driver.h"
#include "mechanisms/refusal.h"
#include "mechanisms/sim_nvml.h"

namespace residency {

absl::StatusOr<DriverKind> ParseDriverKind(std::string_view text) {
  if (text == "cuda") return DriverKind::kCuda;
  if (text == "sim") return DriverKind::kSim;
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_DRIVER",
                absl::StrCat("driver '", std::string(text), "' is unknown; there are cuda and sim"));
}

std::string_view DriverKindName(DriverKind kind) { return kind == DriverKind::kCuda ? "cuda" : "sim"; }

absl::StatusOr<Driver> OpenDriver(DriverKind kind, const SimOptions& sim) {
  return kind == DriverKind::kCuda ? LoadCudaDriver() : OpenSimDriver(sim);
}

absl::StatusOr<Nvml> OpenNvml(DriverKind kind) {
  if (kind == DriverKind::kCuda) return LoadNvml();
  return SimNvml();
}

}  // namespace residency
