// SPDX-License-Identifier: Apache-2.0
//
// Reads a model into mirrors, one for each component, all files in one batch: each file once, from front to back, and
// the disk has reads to do from the first byte to the last. A piece of a mirror is page-locked as soon as its bytes are
// there, on a thread of its own (see Pinner), while the next ones are read; after the last byte only the last piece is
// left. Locking memory whose pages are there goes at 24 to 54 GB/s, and at 2.7 to 6.7 where the driver must ask for
// them (H200's host), so pages are asked for by the threads that read.
#ifndef RESIDENCY_MECHANISMS_MIRROR_READ_H_
#define RESIDENCY_MECHANISMS_MIRROR_READ_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/device.h"
#include "mechanisms/layout.h"
#include "mechanisms/manifest.h"
#include "mechanisms/mirror.h"
#include "mechanisms/mirror_flow.h"
#include "mechanisms/pinner.h"
#include "mechanisms/refill.h"

namespace residency {

struct MirrorOptions {
  RefillOptions refill;
  // How many bytes of tensors are there; false cancels. Called on a worker of the reading, one at a time, with rising
  // values. May be empty.
  std::function<bool(uint64_t done_bytes)> progress;
  // Whose driver page-locks; it outlives the mirrors. Null: nobody's.
  const Device* pin_for = nullptr;
  PinCallbacks pin;
  // The node of the host's memory that they should lie on, as far as it has room; nothing: anywhere.
  std::optional<int> node;
  // Where a device may be filled from meanwhile: is told all but the good end, which the caller tells once it has the
  // mirrors. Of the same layout; outlives them.
  MirrorFlow* flow = nullptr;
};

struct MirrorSet {
  // Of every component of the layout, in its order. All are page-locked, or, where that was not asked for or was
  // refused, none is.
  std::vector<Mirror> mirrors;
  RefillReport report;  // how they were read
  absl::Status placed;  // whether the system took `node`; where it did not, they lie anywhere
};

// The layout was made of this manifest, so that the components and tensors of both correspond by their numbers.
// Blocking, for a worker. A refusal to page-lock is no error, but told to `options.pin`. On failure nothing is left,
// but for what `options.flow` keeps:
//  what Refill answers; CANCELLED/CANCELLED when one of the `progress` says so;
//  RESOURCE_EXHAUSTED/HOST_MEMORY with the needed bytes where the system has no memory for a component;
//  INVALID_ARGUMENT/LAYOUT_MISMATCH where layout and manifest are not of one model.
absl::StatusOr<MirrorSet> ReadMirrors(const Layout& layout, const Manifest& manifest, const MirrorOptions& options);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_MIRROR_READ_H_
