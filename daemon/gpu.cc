// SPDX-License-Identifier: Apache-2.0
#include "daemon/gpu.h"

#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace residency {

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::Open(const Driver& driver, const absl::StatusOr<Nvml>& nvml, int ordinal,
                                               DeviceId id, Loop& decision) {
  auto memory = GpuMemory::Open(driver, ordinal);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<Gpu> gpu(new Gpu(id, decision, nvml, *std::move(memory)));
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

template <typename Work, typename Done>
void Gpu::Run(Loop& loop, Work work, Done done) {
  loop.Post([this, work = std::move(work), done = std::move(done)]() mutable {
    auto result = work();
    if (absl::Status lost = device().Lost(); !lost.ok()) {
      decision_.Post([this, lost = std::move(lost)] { lost_(lost); });
    }
    decision_.Post([result = std::move(result), done = std::move(done)]() mutable { done(std::move(result)); });
  });
}

void Gpu::AddModel(ModelId model, const Layout& layout, std::function<void(absl::Status)> done) {
  Run(
      *loop_, [this, &layout] { return memory_->Reserve(layout); },
      [this, model, done = std::move(done)](absl::StatusOr<std::unique_ptr<Arena>> arena) {
        if (arena.ok()) arenas_.emplace(model, *std::move(arena));
        done(arena.status());
      });
}

void Gpu::RemoveModel(ModelId model, std::function<void(uint64_t)> done) {
  auto node = arenas_.extract(model);
  std::unique_ptr<Arena> arena = node.empty() ? nullptr : std::move(node.mapped());
  // Through the gauge, which may be asking about it just now.
  gauge_->Post([this, arena = std::move(arena), done = std::move(done)]() mutable {
    Run(
        *loop_,
        [arena = std::move(arena)]() mutable {
          const uint64_t device_bytes = arena == nullptr ? 0 : arena->Measure().device_bytes;
          arena.reset();
          return device_bytes;
        },
        std::move(done));
  });
}

void Gpu::Realize(const RealizePlan& effect, const Layout& layout, std::vector<const Source*> sources,
                  std::vector<Giver> givers, std::function<void(std::vector<CellToSend>)> filled,
                  std::function<void(PlanRealized)> done) {
  realizing_ = std::stop_source();
  for (Giver& giver : givers) giver.arena = arenas_.at(giver.model).get();
  Run(
      *loop_,
      [this, effect, &layout, arena = arenas_.at(effect.model).get(), sources = std::move(sources),
       givers = std::move(givers), filled = std::move(filled), stop = realizing_.get_token()] {
        RealizeOptions options{.verify = !effect.skip_verification, .stop = stop};
        if (filled) {
          options.filled = [&](std::span<const uint32_t> indices) {
            // What cannot be had now is asked for again with the rest, where a refusal is told.
            auto cells = memory_->Export(*arena, layout, indices);
            if (cells.ok()) decision_.Post([filled, cells = *std::move(cells)]() mutable { filled(std::move(cells)); });
          };
        }
        return memory_->Realize(effect.model, *arena, effect.plan, sources, options, givers);
      },
      std::move(done));
}

void Gpu::Verify(ModelId model, std::vector<const Source*> sources, std::function<void(CellsVerified)> done) {
  Run(
      *loop_,
      [this, model, arena = arenas_.at(model).get(), sources = std::move(sources)] {
        return memory_->Verify(model, *arena, sources);
      },
      std::move(done));
}

void Gpu::Export(ModelId model, const Layout& layout,
                 std::function<void(absl::StatusOr<std::vector<CellToSend>>)> done) {
  Run(
      *loop_, [this, arena = arenas_.at(model).get(), &layout] { return memory_->Export(*arena, layout); },
      std::move(done));
}

void Gpu::Trim(std::function<void(PoolTrimmed)> done) {
  Run(
      *loop_,
      [this] {
        PoolTrimmed trimmed = memory_->Trim();
        trimmed.device = id_;
        return trimmed;
      },
      std::move(done));
}

void Gpu::Measure(std::function<void(GpuMeasurement)> done) {
  Run(
      *gauge_,
      [this, arenas = Arenas()] {
        const absl::Time began = MonotonicNow();
        GpuMeasurement measurement = memory_->Measure(arenas);
        measurement.processes = MeasureProcesses();
        measurement.duration = MonotonicNow() - began;
        return measurement;
      },
      std::move(done));
}

void Gpu::MeasureInOrder(std::function<void(GpuMeasurement)> done) {
  Run(
      *loop_, [this, arenas = Arenas()] { return memory_->Measure(arenas); }, std::move(done));
}

std::map<ModelId, const Arena*> Gpu::Arenas() const {
  std::map<ModelId, const Arena*> arenas;
  for (const auto& [model, arena] : arenas_) arenas.emplace(model, arena.get());
  return arenas;
}

absl::StatusOr<std::vector<ProcessOnGpu>> Gpu::MeasureProcesses() const {
  if (!nvml_.ok()) return nvml_.status();
  const int64_t self = getpid();
  const auto measured = residency::MeasureProcesses(*nvml_, device().info().uuid, self);
  if (!measured.ok()) return measured.status();
  std::vector<ProcessOnGpu> processes;
  for (const ProcessMemory& process : *measured) {
    processes.push_back({.pid = process.pid, .bytes = process.bytes, .is_daemon = process.pid == self});
    struct stat owned {};
    if (stat(absl::StrCat("/proc/", process.pid).c_str(), &owned) == 0) processes.back().uid = owned.st_uid;
  }
  return processes;
}

}  // namespace residency
