// SPDX-License-Identifier: Apache-2.0
//
// Reads checkpoints on worker threads: headers first, then, when the core has agreed, the bytes into mirrors.
// Owned by the broker; called on the decision loop, which also gets the answers.
#ifndef RESIDENCY_DAEMON_LOADER_H_
#define RESIDENCY_DAEMON_LOADER_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/host_room.h"
#include "daemon/loop.h"
#include "mechanisms/device.h"
#include "mechanisms/file_source.h"
#include "mechanisms/layout.h"
#include "mechanisms/manifest.h"
#include "mechanisms/mirror_flow.h"
#include "mechanisms/mirror_read.h"

namespace residency {

// What became of the mirrors of a model's components.
struct BuiltMirrors {
  absl::Status status;
  std::vector<Mirror> mirrors;          // of every component, page-locked all or none; empty where `status` is not OK
  std::unique_ptr<MappedModel> mapped;  // in place of mirrors, in the host tier kFile
  // Where the driver refused to page-lock them: how, and what it had locked of mirrors by then, for all models.
  absl::Status pin_refusal;
  std::optional<uint64_t> pin_limit_bytes;
  // On a host with several memory nodes: bytes by node as the kernel counted them when all was read, and why the system
  // would not place them on the device's.
  std::map<int, uint64_t> node_bytes;
  absl::Status placed;

  std::vector<const Source*> sources() const;  // of every component
  uint64_t pinned_bytes() const;
  uint64_t host_bytes() const;  // of memory that goes back with this
};

// How far the mirrors of a model are, all components together.
struct BuildProgress {
  uint64_t read_bytes = 0;               // of payload, that are in memory
  std::optional<uint64_t> pinned_bytes;  // page-locked, where that has changed; nothing is any more once it was refused
};

// For a model that is to be activated at once: what a device may be filled from while the mirrors are being read.
struct EarlyFill {
  MirrorFlow* flow = nullptr;          // outlives the reading, and has its mirrors once it is done; null: no such model
  std::function<void()> nearly_built;  // called on the decision loop when little is left to be read, at most once
};

// A checkpoint whose headers were read.
struct Checkpoint {
  Manifest manifest;
  Layout layout;
  uint64_t file_bytes = 0;  // of the pages that the host tier file locks
  // Equal for the same files in the same state and the same tensors of them, different otherwise.
  std::string identity;
};

class Loader {
 public:
  // Starts the workers. `decision` outlives the loader.
  static absl::StatusOr<std::unique_ptr<Loader>> Start(Loop& decision, uint64_t cell_bytes);
  ~Loader();

  // Errors as ReadManifest and MakeLayout.
  void ReadHeaders(std::string source, std::vector<ComponentSource> components, uint64_t granule_bytes,
                   std::function<void(absl::StatusOr<Checkpoint>)> done);

  // Reads the mirrors of all components, and page-locks them for `device` meanwhile as `pin` says. `checkpoint` and
  // `cancelled` (set it to stop: CANCELLED) must live until `done`. `pinned_bytes` says, on any thread, what is
  // page-locked of all mirrors. On failure nothing is left, but for what the flow of `early` keeps.
  // Errors as ReadMirrors; with kMust also RESOURCE_EXHAUSTED/PIN_LIMIT with the bytes of all components and those
  // that could be had, or what else Device::RegisterHost answers.
  void BuildMirrors(const Checkpoint& checkpoint, const Device& device, PinWish pin,
                    std::function<uint64_t()> pinned_bytes, const std::atomic<bool>& cancelled,
                    std::function<void(const BuildProgress&)> progress, EarlyFill early,
                    std::function<void(BuiltMirrors)> done);

  // Maps the checkpoint's files instead and page-locks them for `device`; the rest as for BuildMirrors.
  // Errors as MappedModel::Map.
  void MapFiles(const Checkpoint& checkpoint, const Device& device, std::function<uint64_t()> pinned_bytes,
                const std::atomic<bool>& cancelled, std::function<void(const BuildProgress&)> progress,
                std::function<void(BuiltMirrors)> done);

  // Destroys `what` on a thread of its own, so that no unload waits behind a long read, then calls `done`.
  template <typename T>
  void Discard(std::unique_ptr<T> what, Loop::Task done) {
    Run([what = std::move(what)]() mutable { what.reset(); }, std::move(done));
  }

 private:
  explicit Loader(Loop& decision, uint64_t cell_bytes) : decision_(decision), cell_bytes_(cell_bytes) {}
  Loop& NextWorker();
  // Runs `work` on the returns loop, then `done` on the decision loop.
  void Run(Loop::Task work, Loop::Task done);

  Loop& decision_;
  const uint64_t cell_bytes_;
  std::atomic<bool> stopping_{false};
  std::vector<std::unique_ptr<Loop>> workers_;
  size_t next_worker_ = 0;
  std::unique_ptr<Loop> returns_;
  std::unique_ptr<Loop> headers_;  // of its own, so that a refusal never waits behind a long read
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_LOADER_H_
