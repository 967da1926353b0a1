// SPDX-License-Identifier: Apache-2.0
#include "daemon/gpu_memory.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "daemon/loop.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

bool IsHeld(const Giver& giver) { return giver.held != nullptr && giver.held->any(); }

}  // namespace

absl::StatusOr<std::unique_ptr<GpuMemory>> GpuMemory::Open(const Driver& driver, int ordinal,
                                                           const ArenaOptions& arena_options) {
  auto device = Device::Open(driver, ordinal);
  if (!device.ok()) return device.status();
  absl::Status usable = (*device)->Probe();
  if (ReasonOf(usable) == "DEVICE_LOST") return usable;
  // A card that others have filled says nothing about what it can do; its activations are refused for room.
  if (ReasonOf(usable) == "GPU_MEMORY") usable = absl::OkStatus();
  std::unique_ptr<GpuMemory> memory(new GpuMemory(*std::move(device), std::move(usable), arena_options));
  auto digester = Digester::Create(*memory->device_);
  if (!digester.ok()) return digester.status();
  memory->digester_ = *std::move(digester);
  return memory;
}

void GpuMemory::Close() {
  pool_.Trim();
  digester_.reset();
}

absl::StatusOr<std::unique_ptr<Arena>> GpuMemory::Reserve(const Layout& layout) {
  return Arena::Create(*device_, pool_, *digester_, layout, arena_options_);
}

PlanRealized GpuMemory::Realize(ModelId model, Arena& arena, const Plan& plan, std::span<const Source* const> sources,
                                RealizeOptions options, std::span<const Giver> givers) {
  PlanRealized realized{.model = model};
  const Plan before = arena.CurrentPlan();
  std::vector<Arena*> giver_arenas;
  std::vector<Plan> giver_plans;
  for (const Giver& giver : givers) {
    giver.arena->set_held(giver.held.get());
    giver_arenas.push_back(giver.arena);
    giver_plans.push_back(giver.arena->CurrentPlan());
  }
  options.givers = giver_arenas;
  const uint64_t copied_before_bytes = device_->copied_to_host_bytes();
  const uint64_t pooled_before_bytes = pool_.idle_bytes();
  const absl::StatusOr<MemoryInfo> memory_before = device_->Memory();
  const absl::Time began = MonotonicNow();
  if (const auto report = arena.Realize(plan, sources, options); report.ok()) {
    realized.copied_bytes = report->copied_bytes;
    realized.verified_cells = report->verified_cells;
    realized.refilled_cells = report->refilled_cells;
    realized.unmapped_bytes = report->unmapped_bytes;
    realized.device_bytes = report->device_bytes;
    realized.trusted_cells = report->trusted_cells;
  } else {
    realized.status = report.status();
    realized.device_bytes = arena.Measure().device_bytes;
  }
  for (size_t i = 0; i < givers.size(); ++i) {
    Arena& giver = *givers[i].arena;
    giver.set_held(nullptr);
    GiverEmptied emptied{.model = givers[i].model};
    const bool untouched = giver.CurrentPlan() == giver_plans[i];
    if (!realized.status.ok() && (untouched || IsHeld(givers[i]))) {
      if (!untouched) emptied.status = giver.Return(giver_plans[i], givers[i].sources, end_.get_token());
      emptied.kept = emptied.status.ok();
    } else if (emptied.status = giver.Empty(); !emptied.status.ok()) {
      // There is room for one of the two.
      if (realized.status.ok()) {
        realized.status = emptied.status;
        (void)arena.Return(before, sources, end_.get_token());
        realized.device_bytes = arena.Measure().device_bytes;
      }
      if (arena.broken()) {
        giver.Break();
      } else {
        (void)giver.Return(giver_plans[i], givers[i].sources, end_.get_token());
      }
    }
    emptied.broken = giver.broken();
    emptied.device_bytes = giver.Measure().device_bytes;
    realized.givers.push_back(std::move(emptied));
  }
  realized.duration = MonotonicNow() - began;
  realized.copied_to_host_bytes = device_->copied_to_host_bytes() - copied_before_bytes;
  realized.pooled_bytes = SaturatingSubtract(pool_.idle_bytes(), pooled_before_bytes);
  if (const auto memory_after = device_->Memory(); memory_before.ok() && memory_after.ok()) {
    realized.freed_bytes = SaturatingSubtract(memory_after->free_bytes, memory_before->free_bytes);
  }
  realized.broken = arena.broken();
  return realized;
}

CellsVerified GpuMemory::Verify(ModelId model, Arena& arena, std::span<const Source* const> sources) {
  CellsVerified verified{.model = model};
  const absl::Time began = MonotonicNow();
  if (const auto report = arena.Verify(sources); report.ok()) {
    verified.verified_cells = report->verified_cells;
    verified.refilled_cells = report->refilled_cells;
    verified.absent_cells = report->absent_cells;
  } else {
    verified.status = report.status();
  }
  verified.duration = MonotonicNow() - began;
  verified.broken = arena.broken();
  return verified;
}

absl::StatusOr<std::vector<CellToSend>> GpuMemory::Export(Arena& arena, const Layout& layout,
                                                          std::span<const uint32_t> indices) {
  std::vector<CellToSend> cells;
  for (uint32_t index : indices) {
    const auto descriptor = arena.Descriptor(index);
    if (!descriptor.ok()) return descriptor.status();
    UniqueFd copy(fcntl(*descriptor, F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) {
      const absl::Status status = ErrnoStatus(errno, "duplicating a cell's descriptor");
      return Refuse(status.code(), "DESCRIPTOR_LIMIT", std::string(status.message()));
    }
    const LayoutCell& place = layout.cells[index];
    cells.push_back({index, place.device_offset, place.bytes, std::make_shared<const UniqueFd>(std::move(copy))});
  }
  return cells;
}

PoolTrimmed GpuMemory::Trim() {
  PoolTrimmed trimmed;
  const absl::StatusOr<MemoryInfo> before = device_->Memory();
  trimmed.trimmed_bytes = pool_.Trim();
  const absl::StatusOr<MemoryInfo> after = device_->Memory();
  if (before.ok() && after.ok()) {
    trimmed.freed_bytes = SaturatingSubtract(after->free_bytes, before->free_bytes);
  } else {
    trimmed.status = before.ok() ? after.status() : before.status();
  }
  return trimmed;
}

GpuMeasurement GpuMemory::Measure(const std::map<ModelId, const Arena*>& arenas) const {
  const absl::Time began = MonotonicNow();
  GpuMeasurement measurement;
  measurement.pool_idle_bytes = pool_.idle_bytes();
  for (const auto& [model, arena] : arenas) {
    Footprint footprint = arena->Measure();
    if (measurement.status.ok()) measurement.status = footprint.status;
    measurement.broker_bytes += footprint.device_bytes;
    measurement.models.emplace(model, std::move(footprint));
  }
  if (const auto memory = device_->Memory(); memory.ok()) {
    measurement.memory = *memory;
  } else {
    measurement.status = memory.status();
  }
  measurement.duration = MonotonicNow() - began;
  return measurement;
}

}  // namespace residency
