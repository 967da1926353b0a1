// SPDX-License-Identifier: Apache-2.0
//
// Chooses which driver fills the table. The simulated one is never a fallback: it is used when asked for.
#ifndef RESIDENCY_MECHANISMS_OPEN_DRIVER_H_
#define RESIDENCY_MECHANISMS_OPEN_DRIVER_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "mechanisms/driver.h"
#include "mechanisms/nvml.h"
#include "mechanisms/sim_driver.h"

namespace residency {

// "cuda" or "sim". INVALID_ARGUMENT/BAD_DRIVER names the text and the two.
absl::StatusOr<DriverKind> ParseDriverKind(std::string_view text);
std::string_view DriverKindName(DriverKind kind);

// The table of `kind`; `sim` is used for the simulated driver only. Errors as LoadCudaDriver and
// OpenSimDriver.
absl::StatusOr<Driver> OpenDriver(DriverKind kind, const SimOptions& sim);

// The NVML that belongs to the driver of `kind`, which is open. Errors as LoadNvml.
absl::StatusOr<Nvml> OpenNvml(DriverKind kind);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_OPEN_DRIVER_H_
