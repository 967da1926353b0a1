// SPDX-License-Identifier: Apache-2.0
//
// Computes digests (digest.h) of device memory on the device. Threads: one device loop.
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

  // The digest of each item, in order, computed after what was enqueued on `stream` before; one launch.
  // Waits for the result.
  absl::StatusOr<std::vector<uint64_t>> Digest(std::span<const DigestItem> items, const Stream& stream);

 private:
  Digester(const Device& device, Module module, CUfunction kernel)
      : device_(device), module_(std::move(module)), kernel_(kernel) {}
  absl::Status Reserve(uint64_t item_count);
  absl::Status Settle();

  const Device& device_;
  Module module_;
  CUfunction kernel_;
  DeviceBuffer items_;  // grown to the largest call
  DeviceBuffer sums_;
  std::vector<DigestItem> host_items_;  // what the copies of the last call read and write
  std::vector<uint64_t> host_sums_;
  bool unsettled_ = false;  // something of the last call may still run
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_DIGESTER_H_
