// SPDX-License-Identifier: Apache-2.0
//
// One GPU's memory: the device, its cell pool and its digester, and what is done with them for the decision core,
// each thing from beginning to end in one call. The arenas belong to the caller, who numbers them.
//
// Threads: one device loop calls everything but Measure and the accessors, which any thread may call.
#ifndef RESIDENCY_DAEMON_GPU_MEMORY_H_
#define RESIDENCY_DAEMON_GPU_MEMORY_H_

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/events.h"
#include "daemon/ids.h"
#include "daemon/sessions.h"
#include "mechanisms/arena.h"
#include "mechanisms/cell_pool.h"
#include "mechanisms/device.h"
#include "mechanisms/digester.h"
#include "mechanisms/held_cells.h"
#include "mechanisms/layout.h"
#include "mechanisms/source.h"

namespace residency {

// A process that has memory of a device.
struct ProcessOnGpu {
  int64_t pid = 0;
  std::optional<uint32_t> uid;  // absent: it has gone since
  uint64_t bytes = 0;
  bool is_daemon = false;
};

// What the driver said of a device, all of it asked within `duration`.
struct GpuMeasurement {
  absl::Status status;
  MemoryInfo memory;
  uint64_t pool_idle_bytes = 0;
  uint64_t broker_bytes = 0;
  std::map<ModelId, Footprint> models;
  // What NVML said, for a status only; else why it did not.
  absl::StatusOr<std::vector<ProcessOnGpu>> processes = absl::UnavailableError("NVML was not asked");
  absl::Duration duration;
};

// A model that a Realize of another one empties; all of it outlives the call.
struct Giver {
  ModelId model;
  Arena* arena = nullptr;
  std::vector<const Source*> sources;
  std::shared_ptr<const HeldCells> held;  // which of its cells clients have still; null: none
};

class GpuMemory {
 public:
  // Opens the GPU and probes what it can do. A GPU that cannot map or share is opened all the same, see usable().
  static absl::StatusOr<std::unique_ptr<GpuMemory>> Open(const Driver& driver, int ordinal,
                                                         const ArenaOptions& arena_options = {});

  const Device& device() const { return *device_; }
  // FAILED_PRECONDITION/NO_VMM or NO_EXPORT, as Device::Probe says.
  const absl::Status& usable() const { return usable_; }

  // Reserves the addresses of a model. `layout` and this must outlive the arena.
  absl::StatusOr<std::unique_ptr<Arena>> Reserve(const Layout& layout);
  // `options.givers` is what `givers` say. Where the plan cannot be realized, those of them stay that gave nothing yet,
  // or of which clients have something still; the others are taken off all the same.
  PlanRealized Realize(ModelId model, Arena& arena, const Plan& plan, std::span<const Source* const> sources,
                       RealizeOptions options = {}, std::span<const Giver> givers = {});
  CellsVerified Verify(ModelId model, Arena& arena, std::span<const Source* const> sources);
  // Descriptors for resident cells, duplicates that are the caller's: of `cells`, or of all.
  absl::StatusOr<std::vector<CellToSend>> Export(Arena& arena, const Layout& layout, std::span<const uint32_t> cells);
  absl::StatusOr<std::vector<CellToSend>> Export(Arena& arena, const Layout& layout) {
    return Export(arena, layout, arena.MappedCells());
  }
  // Gives idle cells back to the driver; without its device.
  PoolTrimmed Trim();
  uint64_t pool_idle_bytes() const { return pool_.idle_bytes(); }
  // No model is brought back any more that a Realize could not do without. Any thread.
  void End() { end_.request_stop(); }
  // Gives back everything but the device's context, which page-locked host memory needs to the end. After the
  // arenas are gone.
  void Close();

  // Asks the driver what is there now, perhaps in the middle of a transition.
  GpuMeasurement Measure(const std::map<ModelId, const Arena*>& arenas) const;

 private:
  GpuMemory(std::unique_ptr<Device> device, absl::Status usable, const ArenaOptions& arena_options)
      : arena_options_(arena_options), device_(std::move(device)), usable_(std::move(usable)), pool_(*device_) {}

  const ArenaOptions arena_options_;
  const std::unique_ptr<Device> device_;
  const absl::Status usable_;
  CellPool pool_;
  std::unique_ptr<Digester> digester_;
  std::stop_source end_;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_GPU_MEMORY_H_
