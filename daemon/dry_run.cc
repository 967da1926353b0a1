// SPDX-License-Identifier: Apache-2.0
#include "daemon/dry_run.h"

#include <algorithm>

#include "daemon/status.h"

namespace residency {

v1::DryRun DryRunOf(const RegisterRequested& event, const HostPlan& plan, const DeviceRecord& device,
                    const DeviceRoom& room) {
  v1::DryRun run;
  run.set_payload_bytes(event.layout.payload_bytes);
  run.set_set_bytes(event.layout.span_bytes);
  run.set_host_fits(plan.room.ok());
  run.set_host_needed_bytes(plan.needed_bytes);
  if (plan.available_bytes.has_value()) run.set_host_available_bytes(*plan.available_bytes);
  *run.mutable_pin() = PinProto(plan.pin);
  run.set_device_uuid(device.uuid);

  const uint64_t available_bytes =
      std::min(room.available_bytes(), event.budget.device_bytes.value_or(room.available_bytes()));
  v1::Fit& held = *run.mutable_held();
  held.set_needed_bytes(event.layout.span_bytes);
  held.set_available_bytes(available_bytes);
  held.set_fits(held.needed_bytes() <= available_bytes);
  v1::Fit& phased = *run.mutable_phased();
  phased.set_available_bytes(available_bytes);
  for (const LayoutComponent& component : event.layout.components) {
    if (!phased.component().empty() && component.span_bytes <= phased.needed_bytes()) continue;
    phased.set_component(component.name);
    phased.set_needed_bytes(component.span_bytes);
  }
  phased.set_fits(phased.needed_bytes() <= available_bytes);

  if (event.mode == ModelMode::kHeld && !held.fits() && phased.fits()) run.add_advised_flags("--phased");
  // An explicit choice wins, so it can lock more than leaves the host well.
  const bool can_be_pageable = event.tier != HostTier::kFile;
  if (event.pin == PinPolicy::kYes && plan.little_room && can_be_pageable) run.add_advised_flags("--pin no");
  return run;
}

}  // namespace residency
