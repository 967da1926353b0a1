// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/plan.h"

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace residency {

Plan AllResident(const Layout& layout) {
  Plan plan;
  plan.cells.assign(layout.cells.size(), CellResidency::kResident);
  return plan;
}

Plan NoneResident(const Layout& layout) {
  Plan plan;
  plan.cells.assign(layout.cells.size(), CellResidency::kAbsent);
  return plan;
}

Plan ComponentResident(const Layout& layout, uint32_t component) {
  if (component >= layout.components.size()) {
    std::fprintf(stderr, "CHECK failed: component %u of a layout of %zu\n", component, layout.components.size());
    std::abort();
  }
  Plan plan = NoneResident(layout);
  const LayoutComponent& place = layout.components[component];
  for (uint32_t i = 0; i < place.cell_count; ++i) plan.cells[place.first_cell + i] = CellResidency::kResident;
  return plan;
}

uint64_t Price(const Layout& layout, const Plan& plan) {
  if (plan.cells.size() != layout.cells.size()) {
    std::fprintf(stderr, "CHECK failed: a plan of %zu cells priced against a layout of %zu\n", plan.cells.size(),
                 layout.cells.size());
    std::abort();
  }
  uint64_t bytes = plan.window_slots * layout.cell_bytes;
  for (size_t i = 0; i < plan.cells.size(); ++i) {
    if (plan.cells[i] == CellResidency::kResident) bytes += layout.cells[i].bytes;
  }
  return bytes;
}

}  // namespace residency
