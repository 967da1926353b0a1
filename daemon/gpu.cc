// SPDX-License-Identifier: Apache-2.0
#include "daemon/gpu.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

uint64_t Rise(uint64_t before, uint64_t after) { return after > before ? after - before : 0; }

}  // namespace

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::Open(const Driver& driver, int ordinal, DeviceId id, Loop& decision) {
  auto device = Device::Open(driver, ordinal);
  if (!device.ok()) return device.status();
  absl::Status usable = (*device)->Probe();
  if (ReasonOf(usable) == "DEVICE_LOST") return usable;
  // A card that others have filled says nothing about what it can do; its activations are refused for room.
  if (ReasonOf(usable) == "GPU_MEMORY") usable = absl::OkStatus();
  std::unique_ptr<Gpu> gpu(new Gpu(id, decision, *std::move(device), std::move(usable)));
  gpu->pool_ = std::make_unique<CellPool>(*gpu->device_);
  auto digester = Digester::Create(*gpu->device_);
  if (!digester.ok()) return digester.status();
  gpu->digester_ = *std::move(digester);
  auto loop = Loop::Start(absl::StrCat("device-", id.value));
  if (!loop.ok()) return loop.status();
  gpu->loop_ = *std::move(loop);
  auto gauge = Loop::Start(absl::StrCat("gauge-", id.value));
  if (!gauge.ok()) return gauge.status();
  gpu->gauge_ = *std::move(gauge);
  return gpu;
}

void Gpu::Stop() {
  // The gauge first, since it reads what the device loop ends. What it passes on to that loop is done there.
  gauge_.reset();
  if (loop_ != nullptr) {
    loop_->Post([this] {
      arenas_.clear();
      pool_->Trim();
      digester_.reset();
    });
  }
  loop_.reset();
}

void Gpu::AddModel(ModelId model, const Layout& layout, std::function<void(absl::Status)> done) {
  loop_->Post([this, model, &layout, done = std::move(done)]() mutable {
    auto arena = Arena::Create(*device_, *pool_, *digester_, layout);
    decision_.Post([this, model, arena = std::move(arena), done = std::move(done)]() mutable {
      if (arena.ok()) arenas_.emplace(model, *std::move(arena));
      done(arena.status());
    });
  });
}

void Gpu::RemoveModel(ModelId model, std::function<void(uint64_t)> done) {
  auto node = arenas_.extract(model);
  std::unique_ptr<Arena> arena = node.empty() ? nullptr : std::move(node.mapped());
  // Through the gauge, which may be asking about it just now.
  gauge_->Post([this, arena = std::move(arena), done = std::move(done)]() mutable {
    loop_->Post([this, arena = std::move(arena), done = std::move(done)]() mutable {
      const uint64_t device_bytes = arena == nullptr ? 0 : arena->Measure().device_bytes;
      arena.reset();
      decision_.Post([device_bytes, done = std::move(done)] { done(device_bytes); });
    });
  });
}

void Gpu::Realize(ModelId model, Plan plan, std::vector<const Source*> sources,
                  std::function<void(PlanRealized)> done) {
  Arena* arena = arenas_.at(model).get();
  loop_->Post([this, model, arena, plan = std::move(plan), sources = std::move(sources), done = std::move(done)] {
    PlanRealized realized{.model = model};
    const uint64_t copied_before_bytes = device_->copied_to_host_bytes();
    const uint64_t pooled_before_bytes = pool_->idle_bytes();
    const absl::StatusOr<MemoryInfo> memory_before = device_->Memory();
    const absl::Time began = MonotonicNow();
    if (const auto report = arena->Realize(plan, sources); report.ok()) {
      realized.copied_bytes = report->copied_bytes;
      realized.verified_cells = report->verified_cells;
      realized.refilled_cells = report->refilled_cells;
      realized.unmapped_bytes = report->unmapped_bytes;
    } else {
      realized.status = report.status();
    }
    realized.duration = MonotonicNow() - began;
    realized.copied_to_host_bytes = device_->copied_to_host_bytes() - copied_before_bytes;
    realized.pooled_bytes = Rise(pooled_before_bytes, pool_->idle_bytes());
    if (const auto memory_after = device_->Memory(); memory_before.ok() && memory_after.ok()) {
      realized.freed_bytes = Rise(memory_before->free_bytes, memory_after->free_bytes);
    }
    realized.broken = arena->broken();
    realized.device_bytes = arena->Measure().device_bytes;
    decision_.Post([realized = std::move(realized), done] { done(realized); });
  });
}

void Gpu::Verify(ModelId model, std::vector<const Source*> sources, std::function<void(CellsVerified)> done) {
  Arena* arena = arenas_.at(model).get();
  loop_->Post([this, model, arena, sources = std::move(sources), done = std::move(done)] {
    const absl::Time began = MonotonicNow();
    CellsVerified verified{.model = model};
    if (const auto report = arena->Verify(sources); report.ok()) {
      verified.verified_cells = report->verified_cells;
      verified.refilled_cells = report->refilled_cells;
      verified.absent_cells = report->absent_cells;
    } else {
      verified.status = report.status();
    }
    verified.duration = MonotonicNow() - began;
    verified.broken = arena->broken();
    decision_.Post([verified = std::move(verified), done] { done(verified); });
  });
}

namespace {

absl::StatusOr<std::vector<CellToSend>> ExportResident(Arena& arena, const Layout& layout) {
  std::vector<CellToSend> cells;
  for (uint32_t index : arena.ResidentCells()) {
    const auto descriptor = arena.Descriptor(index);
    if (!descriptor.ok()) return descriptor.status();
    UniqueFd copy(fcntl(*descriptor, F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) {
      const absl::Status status = ErrnoStatus(errno, "duplicating a cell's descriptor");
      return Refuse(status.code(), "DESCRIPTOR_LIMIT", std::string(status.message()));
    }
    const LayoutCell& place = layout.cells[index];
    cells.push_back({index, place.device_offset, place.bytes, std::move(copy)});
  }
  return cells;
}

}  // namespace

void Gpu::Export(ModelId model, const Layout& layout,
                 std::function<void(absl::StatusOr<std::vector<CellToSend>>)> done) {
  Arena* arena = arenas_.at(model).get();
  loop_->Post([this, arena, &layout, done = std::move(done)]() mutable {
    auto cells = ExportResident(*arena, layout);
    decision_.Post([cells = std::move(cells), done = std::move(done)]() mutable { done(std::move(cells)); });
  });
}

void Gpu::Trim() {
  loop_->Post([this] { pool_->Trim(); });
}

void Gpu::Measure(std::function<void(GpuMeasurement)> done) { MeasureOn(*gauge_, std::move(done)); }
void Gpu::MeasureInOrder(std::function<void(GpuMeasurement)> done) { MeasureOn(*loop_, std::move(done)); }

void Gpu::MeasureOn(Loop& loop, std::function<void(GpuMeasurement)> done) {
  std::map<ModelId, const Arena*> arenas;
  for (const auto& [model, arena] : arenas_) arenas.emplace(model, arena.get());
  loop.Post([this, arenas = std::move(arenas), done = std::move(done)] {
    GpuMeasurement measurement = MeasureNow(arenas);
    decision_.Post([measurement = std::move(measurement), done] { done(measurement); });
  });
}

GpuMeasurement Gpu::MeasureNow(const std::map<ModelId, const Arena*>& arenas) const {
  const absl::Time began = MonotonicNow();
  GpuMeasurement measurement;
  if (const auto memory = device_->Memory(); memory.ok()) {
    measurement.memory = *memory;
  } else {
    measurement.status = memory.status();
  }
  measurement.pool_idle_bytes = pool_->idle_bytes();
  for (const auto& [model, arena] : arenas) {
    Footprint footprint = arena->Measure();
    measurement.broker_bytes += footprint.device_bytes;
    measurement.models.emplace(model, std::move(footprint));
  }
  measurement.duration = MonotonicNow() - began;
  return measurement;
}

}  // namespace residency
