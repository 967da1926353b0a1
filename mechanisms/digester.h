// SPDX-License-Identifier: Apache-2.0
//
// Computes digests (digest.h) of device memory on the device, on a stream of its own, so that what was copied is
// digested while the rest is still being copied. Threads: one device loop.
#ifndef RESIDENCY_MECHANISMS_DIGESTER_H_
#define RESIDENCY_MECHANISMS_DIGESTER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/device.h"
#include "mechanisms/digest.h"

namespace residency {

void CloseModule(const Device& device, CUmodule module, uint64_t bytes);
using Module = Owned<CUmodule, CloseModule>;

class Digester {
 public:
  // Loads the digest kernel onto `device`, which must outlive this.
  static absl::StatusOr<std::unique_ptr<Digester>> Create(const Device& device);

  // The digest of each item, in order. Nothing may be writing to them any more. Waits for the result.
  absl::StatusOr<std::vector<uint64_t>> Digest(std::span<const DigestItem> items);

  // The same in batches: Begin with all items, Launch for ranges of them that together are all, Finish. A run that was
  // not finished is given up by the next Begin, or by Settle.
  absl::Status Begin(std::span<const DigestItem> items);
  // Digests items [first, first + count), after what was enqueued on `after` before. Waits for nothing.
  absl::Status Launch(size_t first, size_t count, const Stream& after);
  absl::StatusOr<std::vector<uint64_t>> Finish();

  // Waits for what may still run of a run that was not finished: from then on nothing reads its items.
  absl::Status Settle();

 private:
  Digester(const Device& device, Module module, CUfunction kernel, Stream stream, StreamEvent copied)
      : device_(device),
        module_(std::move(module)),
        kernel_(kernel),
        stream_(std::move(stream)),
        copied_(std::move(copied)) {}
  absl::Status Reserve(uint64_t item_count);
  absl::Status LaunchNow(size_t first, size_t count);

  const Device& device_;
  Module module_;
  CUfunction kernel_;
  Stream stream_;
  StreamEvent copied_;  // what the next launch waits for
  DeviceBuffer items_;  // grown to the largest call
  DeviceBuffer sums_;
  std::vector<DigestItem> host_items_;  // what the copies of the last run read and write
  std::vector<uint64_t> host_sums_;
  bool unsettled_ = false;  // something of the last run may still be under way
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_DIGESTER_H_
