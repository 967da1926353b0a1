// SPDX-License-Identifier: Apache-2.0
//
// A plan says of each cell of a layout whether it is on the device, streams through a window, or is
// absent, and what that costs. Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_PLAN_H_
#define RESIDENCY_MECHANISMS_PLAN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "mechanisms/layout.h"

namespace residency {

// What a model may hold at most. Unset is not zero: unset asks for whatever the model needs.
struct Budget {
  std::optional<uint64_t> device_bytes;
  std::optional<uint64_t> host_bytes;

  bool operator==(const Budget&) const = default;
};

enum class CellResidency : uint8_t { kAbsent, kWindowed, kResident };

struct Plan {
  std::vector<CellResidency> cells;  // one for each cell of the layout
  uint32_t window_slots = 0;         // slots of cell_bytes each; 0 unless a cell is windowed

  bool operator==(const Plan&) const = default;
};

Plan AllResident(const Layout& layout);
Plan NoneResident(const Layout& layout);
// The cells of one component; `component` is one of the layout's (CHECK).
Plan ComponentResident(const Layout& layout, uint32_t component);

// Exact device bytes of `plan`: the resident cells and the window slots. After Arena::Realize the
// measured footprint equals it to the byte. `plan` must have as many cells as `layout` (CHECK).
uint64_t Price(const Layout& layout, const Plan& plan);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_PLAN_H_
