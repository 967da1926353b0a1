// SPDX-License-Identifier: Apache-2.0
//
// What must always hold of the rig, asked from the driver past the daemon.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/core_rig.h"

namespace residency {

uint64_t CoreRig::InodeOf(CUmemGenericAllocationHandle handle) const {
  const auto found = inodes_.find(handle);
  return found == inodes_.end() ? 0 : found->second;
}

std::string CoreRig::CheckOwners() {
  if (!complaint_.empty()) return complaint_;
  const CUresult health = truth_->driver().cuStreamQuery(nullptr);
  if (health != CUDA_SUCCESS && health != CUDA_ERROR_NOT_READY) return absl::StrCat("the context is lost: ", health);
  std::set<CUmemGenericAllocationHandle> owned;
  std::map<std::pair<ModelId, uint32_t>, CUmemGenericAllocationHandle> lies;
  uint64_t arena_bytes = 0;
  for (const auto& [id, model] : models_) {
    if (model.arena == nullptr) continue;
    const Layout& layout = model.checkpoint->layout();
    uint64_t measured_bytes = 0;
    for (uint32_t cell = 0; cell < layout.cells.size(); ++cell) {
      const auto handle = truth_->HandleAt(model.arena->address() + layout.cells[cell].device_offset);
      if (!handle.ok()) return handle.status().ToString();
      const bool planned = model.plan.cells[cell] == CellResidency::kResident;
      if (!model.arena->broken() && planned != (*handle != 0)) {
        return absl::StrCat(model.checkpoint->name(), " cell ", cell, " is ", planned ? "not " : "", "there");
      }
      if (*handle == 0) continue;
      if (!owned.insert(*handle).second) return absl::StrCat(model.checkpoint->name(), " cell ", cell, " is shared");
      lies[{id, cell}] = *handle;
      measured_bytes += layout.cells[cell].bytes;
    }
    if (!model.arena->broken() && measured_bytes != Price(layout, model.plan)) {
      return absl::StrCat(model.checkpoint->name(), " measures ", measured_bytes, ", priced at ",
                          Price(layout, model.plan));
    }
    arena_bytes += measured_bytes;
    const auto record = arbiter_->records().models.find(id);
    if (record == arbiter_->records().models.end()) continue;
    if (record->second.state == ModelState::kInactive && measured_bytes != 0) {
      return absl::StrCat(model.checkpoint->name(), " is inactive and has ", measured_bytes, " bytes on the GPU");
    }
    if (record->second.state == ModelState::kActive && measured_bytes > record->second.claimed_device_bytes) {
      return absl::StrCat(model.checkpoint->name(), " has ", measured_bytes, " bytes, claimed ",
                          record->second.claimed_device_bytes);
    }
  }
  const DriverHoldings& holdings = FaultDriver::holdings();
  const uint64_t pool_bytes = memory_->pool_idle_bytes();
  if (holdings.held_bytes() != arena_bytes + pool_bytes) {
    return absl::StrCat("the daemon holds ", holdings.held_bytes(), " bytes of handles; ", arena_bytes,
                        " are under models and ", pool_bytes, " in the pool");
  }
  const uint64_t budget_bytes = arbiter_->records().devices.begin()->second.budget_bytes;
  if (arena_bytes > budget_bytes) return absl::StrCat(arena_bytes, " bytes under models, budget ", budget_bytes);
  uint64_t claimed_bytes = 0;
  for (const auto& [id, record] : arbiter_->records().models) {
    const bool claims = record.state == ModelState::kActive || record.state == ModelState::kActivating;
    if (claims) claimed_bytes += record.claimed_device_bytes;
  }
  if (claimed_bytes > budget_bytes) return absl::StrCat(claimed_bytes, " bytes claimed, budget ", budget_bytes);
  for (const auto& [session, client] : clients_) {
    for (const auto& [id, lease] : client.leases) {
      const Layout& layout = lease.checkpoint->layout();
      for (uint32_t cell = 0; cell < layout.cells.size(); ++cell) {
        const auto mapped = lease.cells.find(cell);
        const bool readable = truth_->IsBacked(lease.span.get() + layout.cells[cell].device_offset);
        if (readable != (mapped != lease.cells.end())) {
          return absl::StrCat("lease ", id.value, " cell ", cell, " is ",
                              readable ? "readable after its release" : "gone");
        }
        if (!readable) continue;
        // What nobody can use yet may be gone from there again, with a filling that failed.
        if (!lease.open) continue;
        const auto there = lies.find({lease.model, cell});
        if (there == lies.end() || InodeOf(there->second) != mapped->second.inode) {
          return absl::StrCat("lease ", id.value, " of session ", session.value, " reads cell ", cell, " of ",
                              lease.checkpoint->name(), ", which the daemon has taken");
        }
      }
      const auto model = models_.find(lease.model);
      if (lease.uses == 0 || model == models_.end()) continue;
      const auto& plan = model->second.plan.cells;
      const auto resident = std::count(plan.begin(), plan.end(), CellResidency::kResident);
      if (static_cast<int64_t>(lease.cells.size()) != resident) {
        return absl::StrCat("lease ", id.value, " is in use without its cells");
      }
    }
  }
  const bool patient = std::any_of(clients_.begin(), clients_.end(), [](const auto& entry) {
    const Client& client = entry.second;
    return client.hung_up || std::any_of(client.leases.begin(), client.leases.end(),
                                         [](const auto& lease) { return lease.second.uses > 0; });
  });
  if (!quiet() || patient) return "";
  const auto& leases = arbiter_->records().leases;
  const bool in_phase =
      std::any_of(leases.begin(), leases.end(), [](const auto& entry) { return bool(entry.second.phase); });
  for (RequestId request : asked_) {
    // The beginning of a phase waits for the end of another one.
    if (in_phase && phases_asked_.contains(request)) continue;
    return absl::StrCat("request ", request.value, " waits, and nothing is under way");
  }
  return "";
}

std::string CoreRig::CheckBytes(bool all, uint64_t random) {
  const auto compare = [&](CUdeviceptr address, const RigCheckpoint& checkpoint, uint32_t cell) {
    const auto* there = reinterpret_cast<const std::byte*>(address);
    const std::byte* right = checkpoint.CellData(cell);
    const uint64_t bytes = checkpoint.layout().cells[cell].bytes;
    if (all) return std::memcmp(there, right, bytes) == 0;
    const uint64_t place = random % (bytes / 64) * 64;
    return std::memcmp(there + place, right + place, 64) == 0;
  };
  for (const auto& [id, model] : models_) {
    if (model.arena == nullptr || model.arena->broken()) continue;
    const Layout& layout = model.checkpoint->layout();
    for (uint32_t cell = 0; cell < layout.cells.size(); ++cell) {
      if (model.plan.cells[cell] != CellResidency::kResident) continue;
      if (!compare(model.arena->address() + layout.cells[cell].device_offset, *model.checkpoint, cell)) {
        return absl::StrCat(model.checkpoint->name(), " cell ", cell, " holds wrong bytes");
      }
    }
  }
  for (const auto& [session, client] : clients_) {
    for (const auto& [id, lease] : client.leases) {
      const auto model = models_.find(lease.model);
      if (model == models_.end() || model->second.arena == nullptr || model->second.arena->broken()) continue;
      if (!lease.open) continue;
      for (const auto& [cell, mapped] : lease.cells) {
        if (!compare(lease.span.get() + lease.checkpoint->layout().cells[cell].device_offset, *lease.checkpoint,
                     cell)) {
          return absl::StrCat("lease ", id.value, " reads wrong bytes in cell ", cell, " of ",
                              lease.checkpoint->name());
        }
      }
    }
  }
  return "";
}

std::string CoreRig::CheckEmpty() {
  memory_->Trim();
  const DriverHoldings& holdings = FaultDriver::holdings();
  if (holdings.held_handles() != 0) return absl::StrCat(holdings.held_handles(), " handles are left");
  const size_t ranges = holdings.ranges.size() - static_cast<size_t>(holdings.refused_ranges);
  if (ranges != ranges_at_start_) return absl::StrCat(ranges, " reserved ranges, ", ranges_at_start_, " at the start");
  FaultDriver::TakeBackRefused();
  const uint64_t free_bytes = truth_->Memory()->free_bytes;
  if (free_bytes != free_at_start_bytes_) {
    return absl::StrCat(free_bytes, " bytes are free, ", free_at_start_bytes_, " were at the start");
  }
  return "";
}

void CoreRig::Scribble(ModelId id, uint32_t cell) {
  const LiveModel& model = models_.at(id);
  const CUdeviceptr address = model.arena->address() + model.checkpoint->layout().cells[cell].device_offset;
  *reinterpret_cast<uint64_t*>(address + 4096) ^= 1;
}

}  // namespace residency
