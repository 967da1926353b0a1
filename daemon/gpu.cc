// SPDX-License-Identifier: Apache-2.0
#include "daemon/gpu.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace residency {

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::Open(const Driver& driver, int ordinal, DeviceId id, Loop& decision) {
  auto memory = GpuMemory::Open(driver, ordinal);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<Gpu> gpu(new Gpu(id, decision, *std::move(memory)));
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
      memory_->Close();
    });
  }
  loop_.reset();
}

void Gpu::AddModel(ModelId model, const Layout& layout, std::function<void(absl::Status)> done) {
  loop_->Post([this, model, &layout, done = std::move(done)]() mutable {
    auto arena = memory_->Reserve(layout);
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
  realizing_ = std::stop_source();
  loop_->Post([this, model, arena, plan = std::move(plan), sources = std::move(sources), stop = realizing_.get_token(),
               done = std::move(done)] {
    PlanRealized realized = memory_->Realize(model, *arena, plan, sources, stop);
    decision_.Post([realized = std::move(realized), done] { done(realized); });
  });
}

void Gpu::Verify(ModelId model, std::vector<const Source*> sources, std::function<void(CellsVerified)> done) {
  Arena* arena = arenas_.at(model).get();
  loop_->Post([this, model, arena, sources = std::move(sources), done = std::move(done)] {
    CellsVerified verified = memory_->Verify(model, *arena, sources);
    decision_.Post([verified = std::move(verified), done] { done(verified); });
  });
}

void Gpu::Export(ModelId model, const Layout& layout,
                 std::function<void(absl::StatusOr<std::vector<CellToSend>>)> done) {
  Arena* arena = arenas_.at(model).get();
  loop_->Post([this, arena, &layout, done = std::move(done)]() mutable {
    auto cells = memory_->Export(*arena, layout);
    decision_.Post([cells = std::move(cells), done = std::move(done)]() mutable { done(std::move(cells)); });
  });
}

void Gpu::Trim() {
  loop_->Post([this] { memory_->Trim(); });
}

void Gpu::Measure(std::function<void(GpuMeasurement)> done) { MeasureOn(*gauge_, std::move(done)); }
void Gpu::MeasureInOrder(std::function<void(GpuMeasurement)> done) { MeasureOn(*loop_, std::move(done)); }

void Gpu::MeasureOn(Loop& loop, std::function<void(GpuMeasurement)> done) {
  std::map<ModelId, const Arena*> arenas;
  for (const auto& [model, arena] : arenas_) arenas.emplace(model, arena.get());
  loop.Post([this, arenas = std::move(arenas), done = std::move(done)] {
    GpuMeasurement measurement = memory_->Measure(arenas);
    decision_.Post([measurement = std::move(measurement), done] { done(measurement); });
  });
}

}  // namespace residency
