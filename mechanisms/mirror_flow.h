// SPDX-License-Identifier: Apache-2.0
//
// A model's cells while its mirrors are still being read (ReadMirrors), so that a device is filled while the last bytes
// come. A cell may be copied once the piece that holds it is complete, and page-locked where that is tried; what was
// copied counts once the reading has ended well. From then on this passes on to the mirrors.
//
// What a fill may be copying from is neither unlocked nor unmapped under it: where the reading fails after the first
// cell was given out, or page-locking is refused, this keeps the memory or the registrations until it is destroyed,
// which is its owner's to do when no fill is under way. Who reads never waits for who fills.
//
// Threads: any, but for the destructor.
#ifndef RESIDENCY_MECHANISMS_MIRROR_FLOW_H_
#define RESIDENCY_MECHANISMS_MIRROR_FLOW_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stop_token>
#include <vector>

#include "absl/status/status.h"
#include "mechanisms/device.h"
#include "mechanisms/layout.h"
#include "mechanisms/mirror.h"
#include "mechanisms/mirror_memory.h"
#include "mechanisms/source.h"

namespace residency {

// What is left of a reading.
struct MirrorRemains {
  std::vector<MirrorMemory> memory;
  std::vector<Mirror> mirrors;
  std::vector<HostRegistration> pinned;  // last, so that they go first
};

class MirrorFlow {
 public:
  explicit MirrorFlow(const Layout& layout);
  ~MirrorFlow();
  MirrorFlow(const MirrorFlow&) = delete;
  MirrorFlow& operator=(const MirrorFlow&) = delete;

  // For who fills: of every component, as long as this.
  std::vector<const Source*> sources() const;

  // ---- For who reads. ----

  // Where the image of each component lies from now on. With `locks`, cells wait until they are page-locked too.
  void Begin(std::vector<const std::byte*> images, bool locks);
  // A range of whole cells has all of its bytes, and is page-locked.
  void Complete(uint32_t component, uint64_t offset, uint64_t bytes) { Mark(component, offset, bytes, kComplete); }
  void Locked(uint32_t component, uint64_t offset, uint64_t bytes) { Mark(component, offset, bytes, kLocked); }
  // Nothing more will be page-locked, and what was is to be given back.
  void GiveBack(std::vector<HostRegistration> pinned);
  // No more cell is given out, and none that was counts; the first status is the one that is told. Frees `remains`, or
  // keeps it.
  void Fail(const absl::Status& status, MirrorRemains remains);
  // Keeps the mirrors until their owner takes them.
  void Deliver(std::vector<Mirror> mirrors);

  // ---- For the owner. ----

  std::vector<Mirror> TakeMirrors();
  // The reading has ended well. `mirrors` are of every component and outlive all use of this.
  void Finish(std::vector<const Source*> mirrors);

 private:
  class Component;
  enum Having : uint8_t { kComplete = 1, kLocked = 2 };
  struct Cell {
    uint64_t offset;  // in the image
    uint64_t bytes;
    uint8_t has = 0;  // of Having
  };

  void Mark(uint32_t component, uint64_t offset, uint64_t bytes, Having what);
  absl::Status AwaitCell(uint32_t cell, const std::stop_token& stop);
  absl::Status AwaitEnd(const std::stop_token& stop);
  const Source* MirrorOf(uint32_t component) const;
  CellPart PartOf(uint32_t component, uint32_t cell) const;
  absl::Status status() const;

  std::vector<std::unique_ptr<Component>> components_;
  std::vector<uint32_t> first_cells_;  // of each component, and behind the last one

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable_any changed_;
  std::vector<Cell> cells_;
  std::vector<const std::byte*> images_;  // empty: not begun
  bool locks_ = false;
  bool given_out_ = false;    // a cell was
  bool giving_back_ = false;  // registrations, just now
  absl::Status status_;
  std::vector<const Source*> mirrors_;  // empty: not finished
  MirrorRemains kept_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_MIRROR_FLOW_H_
