// SPDX-License-Identifier: Apache-2.0
//
// One GPU of the daemon: its device loop, on which every call that changes its memory (gpu_memory.h) is made, and its
// gauge, a second thread that only asks the driver, so that a status never waits behind a transition. Driver calls do
// not get faster on more threads, and none of them waits for a kernel, so one thread per GPU is enough.
//
// Owned by the broker, on the decision loop; what is passed to Realize and the like runs on the device loop, its
// answer on the decision loop.
#ifndef RESIDENCY_DAEMON_GPU_H_
#define RESIDENCY_DAEMON_GPU_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/events.h"
#include "daemon/gpu_memory.h"
#include "daemon/ids.h"
#include "daemon/loop.h"
#include "daemon/sessions.h"
#include "mechanisms/arena.h"
#include "mechanisms/layout.h"
#include "mechanisms/numa.h"
#include "mechanisms/nvml.h"
#include "mechanisms/source.h"

namespace residency {

class Gpu {
 public:
  // Opens the GPU, probes what it can do and starts its threads. `decision` outlives it. A GPU that cannot map
  // or share is opened all the same, see usable(). `nvml` tells processes apart, or why nothing does.
  static absl::StatusOr<std::unique_ptr<Gpu>> Open(const Driver& driver, const absl::StatusOr<Nvml>& nvml, int ordinal,
                                                   DeviceId id, Loop& decision);
  ~Gpu() { Stop(); }

  // Ends the threads when what they were told is done, and gives the device memory back. The caller must keep every
  // layout and source until then. For the end, after the decision loop was stopped.
  void Stop();

  DeviceId id() const { return id_; }
  const Device& device() const { return memory_->device(); }
  // As NodeForDevice said when it was opened; it does not change.
  std::optional<int> numa_node() const { return numa_node_; }
  // FAILED_PRECONDITION/NO_VMM or NO_EXPORT, as Device::Probe says.
  const absl::Status& usable() const { return memory_->usable(); }

  // Reserves the addresses of a model. `layout` must outlive RemoveModel.
  void AddModel(ModelId model, const Layout& layout, std::function<void(absl::Status)> done);
  // Unmaps and forgets the model, then calls `done`; nothing touches its layout and sources from then on.
  void RemoveModel(ModelId model, std::function<void(uint64_t device_bytes)> done);

  // `givers` are models of this GPU too, their arenas are filled in here. `filled` gets descriptors of cells as
  // RealizeOptions::filled tells of them, all before `done`; it may be empty.
  void Realize(const RealizePlan& effect, const Layout& layout, std::vector<const Source*> sources,
               std::vector<Giver> givers, std::function<void(std::vector<CellToSend>)> filled,
               std::function<void(PlanRealized)> done);
  // Stops the Realize that was told last, and undoes it, where it is not through yet; it is done with CANCELLED then.
  void CancelRealize() { realizing_.request_stop(); }
  // The same, and what a Realize would bring back stays off, for nobody will use it.
  void End() {
    memory_->End();
    CancelRealize();
  }
  void Verify(ModelId model, std::vector<const Source*> sources, std::function<void(CellsVerified)> done);
  // Descriptors for all resident cells.
  void Export(ModelId model, const Layout& layout, std::function<void(absl::StatusOr<std::vector<CellToSend>>)> done);
  void Trim(std::function<void(PoolTrimmed)> done);

  // Called on the decision loop, before the answer to what met it, when a sticky error was seen: see Device::Lost. May
  // be called again. Set before anything else is asked.
  void OnLost(std::function<void(const absl::Status&)> lost) { lost_ = std::move(lost); }

  // Asks the driver and NVML, on the gauge: what is there now, perhaps in the middle of a transition.
  void Measure(std::function<void(GpuMeasurement)> done);
  // Asks the driver, on the device loop: what is there when all that was told before is done. For decisions.
  void MeasureInOrder(std::function<void(GpuMeasurement)> done);

 private:
  Gpu(DeviceId id, Loop& decision, const absl::StatusOr<Nvml>& nvml, std::unique_ptr<GpuMemory> memory)
      : id_(id),
        decision_(decision),
        nvml_(nvml),
        memory_(std::move(memory)),
        numa_node_(NodeForDevice(memory_->device().info().pci_id)) {}
  // Runs `work` on `loop` and hands what it returned to `done` on the decision loop.
  template <typename Work, typename Done>
  void Run(Loop& loop, Work work, Done done);
  std::map<ModelId, const Arena*> Arenas() const;
  absl::StatusOr<std::vector<ProcessOnGpu>> MeasureProcesses() const;

  const DeviceId id_;
  Loop& decision_;
  const absl::StatusOr<Nvml> nvml_;
  const std::unique_ptr<GpuMemory> memory_;
  const std::optional<int> numa_node_;
  std::stop_source realizing_;                        // of the last Realize
  std::map<ModelId, std::unique_ptr<Arena>> arenas_;  // the map is the decision loop's, the arenas the device loop's
  std::function<void(const absl::Status&)> lost_ = [](const absl::Status&) {};
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Loop> gauge_;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_GPU_H_
