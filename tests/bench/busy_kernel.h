// SPDX-License-Identifier: Apache-2.0
//
// A kernel that reads device memory at full rate without a pause: the digest kernel over a buffer, one launch always
// waiting behind the one that runs. By the driver's calls and not through Digester, which waits for each result. For
// plain_copy; one thread.
#ifndef RESIDENCY_TESTS_BENCH_BUSY_KERNEL_H_
#define RESIDENCY_TESTS_BENCH_BUSY_KERNEL_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/device.h"

namespace residency {

class BusyKernel {
 public:
  // `device` outlives it. Takes `buffer_bytes` of its memory.
  static absl::StatusOr<std::unique_ptr<BusyKernel>> Make(const Device& device, uint64_t buffer_bytes);

  // Returns when the launch before the one that it adds has ended.
  absl::Status Launch();

  uint64_t launches() const { return launches_; }
  // What each launch reads.
  uint64_t bytes_each() const { return kItems * buffer_bytes_; }

 private:
  // Each launch reads the buffer so often that it takes milliseconds.
  static constexpr uint32_t kItems = 8;

  BusyKernel(const Device& device, uint64_t buffer_bytes) : device_(device), buffer_bytes_(buffer_bytes) {}
  absl::Status LoadKernel();
  absl::Status FillItems();

  const Device& device_;
  const uint64_t buffer_bytes_;
  CUfunction kernel_ = nullptr;
  DeviceBuffer buffer_;
  DeviceBuffer items_;
  DeviceBuffer sums_;
  Stream stream_;
  StreamEvent ended_[2];
  uint64_t launches_ = 0;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_BENCH_BUSY_KERNEL_H_
