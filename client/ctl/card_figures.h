// SPDX-License-Identifier: Apache-2.0
//
// What a card and its link can do, measured through the driver in this process: the floor that the daemon's own figures
// are held against, and what it would cost to choose another cell size. It makes a CUDA context of its own, so it works
// beside a running daemon, with whatever that leaves free. One thread.
#ifndef RESIDENCY_CLIENT_CTL_CARD_FIGURES_H_
#define RESIDENCY_CLIENT_CTL_CARD_FIGURES_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "mechanisms/device.h"

namespace residency {

// Bytes per second, of several times.
struct Rate {
  double median = 0;
  double least = 0;
  double most = 0;
  uint64_t times = 0;
};

// For one cell of `bytes`, the median of several rounds.
struct CellFigures {
  uint64_t bytes = 0;
  absl::Duration create;
  absl::Duration map;
  absl::Duration set_access;
  absl::Duration export_descriptor;
  std::optional<absl::Duration> import_descriptor;  // absent: the driver does not import in the process that exported
  absl::Duration unmap;
  absl::Duration release;
};

struct CardFigures {
  DeviceInfo device;
  std::string driver;            // "580.159.04, CUDA 13.0"
  std::string pcie;              // "32.0 GT/s x16 of 32.0 GT/s x16", as it was just after the copies; "unknown"
  std::string kernel;            // "Linux 6.1.0-18-amd64"
  uint64_t measured_bytes = 0;   // that each copy had
  uint64_t huge_page_bytes = 0;  // of these, in huge pages of the host
  double fault_in_bytes_per_second = 0;
  double page_lock_bytes_per_second = 0;  // of memory that is there already
  Rate copy;                              // page-locked host memory to the device, one copy at a time
  Rate digest;                            // on the device
  std::vector<CellFigures> cells;         // of the sizes for which there is room
};

inline constexpr uint64_t kMeasureBytes = uint64_t{1} << 30;
inline constexpr uint64_t kLeastMeasureBytes = uint64_t{16} << 20;

// Measures with at most `most_bytes`, less where the card or the host has less room. `stage` hears what is being
// measured. All memory is given back before it returns.
// RESOURCE_EXHAUSTED/GPU_MEMORY, HOST_MEMORY: less than kLeastMeasureBytes is free, with both figures; PIN_LIMIT: so
// much cannot be page-locked. FAILED_PRECONDITION/NO_VMM, NO_EXPORT; UNAVAILABLE/DEVICE_LOST; INTERNAL/DRIVER.
absl::StatusOr<CardFigures> MeasureCard(const Device& device, uint64_t most_bytes,
                                        const std::function<void(const std::string&)>& stage);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_CARD_FIGURES_H_
