// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/digester.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// Enough blocks to fill any GPU we know (132 multiprocessors of up to 8 such blocks), while few enough
// that the sums' atomic additions cost nothing.
constexpr uint32_t kDigestBlocks = 1056;

// A model of 256 GiB in cells of 64 MiB; one granule of device memory holds these items, one their sums.
constexpr uint64_t kItemsAtStart = 4096;

}  // namespace

void CloseModule(const Device& device, CUmodule module, uint64_t) {
  if (device.MakeCurrent().ok()) (void)device.Check(device.driver().cuModuleUnload(module), "cuModuleUnload");
}

absl::StatusOr<std::unique_ptr<Digester>> Digester::Create(const Device& device) {
  if (auto status = device.MakeCurrent(); !status.ok()) return status;
  const Driver& driver = device.driver();
  const std::span<const unsigned char> image = DigestFatbin();
  CUmodule handle = nullptr;
  if (auto status = device.Check(driver.cuModuleLoadData(&handle, image.data()), "cuModuleLoadData"); !status.ok()) {
    return status;
  }
  Module module(device, handle);
  CUfunction kernel = nullptr;
  if (auto status = device.Check(driver.cuModuleGetFunction(&kernel, handle, kDigestKernel), "cuModuleGetFunction");
      !status.ok()) {
    return status;
  }
  auto stream = device.CreateStream();
  if (!stream.ok()) return stream.status();
  auto copied = device.CreateEvent();
  if (!copied.ok()) return copied.status();
  std::unique_ptr<Digester> digester(
      new Digester(device, std::move(module), kernel, *std::move(stream), *std::move(copied)));
  // Now rather than at the first activation, after which the device's free figure would not return to what it was.
  if (auto status = digester->Reserve(kItemsAtStart); !status.ok()) return status;
  return digester;
}

absl::Status Digester::Reserve(uint64_t item_count) {
  if (items_.bytes() >= item_count * sizeof(DigestItem)) return absl::OkStatus();
  auto items = device_.Allocate(item_count * sizeof(DigestItem));
  if (!items.ok()) return items.status();
  auto sums = device_.Allocate(item_count * sizeof(uint64_t));
  if (!sums.ok()) return sums.status();
  items_ = *std::move(items);
  sums_ = *std::move(sums);
  return absl::OkStatus();
}

absl::Status Digester::Begin(std::span<const DigestItem> items) {
  if (auto status = Settle(); !status.ok()) return status;
  if (auto status = Reserve(items.size()); !status.ok()) return status;
  host_items_.assign(items.begin(), items.end());
  host_sums_.assign(items.size(), 0);
  if (items.empty()) return absl::OkStatus();
  unsettled_ = true;
  if (auto status = device_.CopyToDevice(items_.get(), host_items_.data(), items.size_bytes(), stream_); !status.ok()) {
    return status;
  }
  return device_.Zero(sums_.get(), host_sums_.size() * sizeof(uint64_t), stream_);
}

absl::Status Digester::Launch(size_t first, size_t count, const Stream& after) {
  // The wait is for what the event marks now; that it marks something later afterwards does not matter to it.
  unsettled_ = true;
  if (auto status = device_.Record(copied_, after); !status.ok()) return status;
  if (auto status = device_.Wait(stream_, copied_); !status.ok()) return status;
  return LaunchNow(first, count);
}

absl::Status Digester::LaunchNow(size_t first, size_t count) {
  CUdeviceptr items_address = items_.get() + first * sizeof(DigestItem);
  CUdeviceptr sums_address = sums_.get() + first * sizeof(uint64_t);
  uint32_t item_count = static_cast<uint32_t>(count);
  void* parameters[] = {&items_address, &item_count, &sums_address};
  const CUresult launched = device_.driver().cuLaunchKernel(kernel_, kDigestBlocks, 1, 1, kDigestThreads, 1, 1, 0,
                                                            stream_.get(), parameters, nullptr);
  return device_.Check(launched, "cuLaunchKernel");
}

absl::StatusOr<std::vector<uint64_t>> Digester::Finish() {
  if (host_sums_.empty()) return std::vector<uint64_t>();
  const uint64_t sums_bytes = host_sums_.size() * sizeof(uint64_t);
  unsettled_ = true;
  if (auto status = device_.CopyToHost(host_sums_.data(), sums_.get(), sums_bytes, stream_); !status.ok()) {
    return status;
  }
  if (auto status = Settle(); !status.ok()) return status;
  return host_sums_;
}

absl::StatusOr<std::vector<uint64_t>> Digester::Digest(std::span<const DigestItem> items) {
  if (auto status = Begin(items); !status.ok()) return status;
  if (items.empty()) return std::vector<uint64_t>();
  if (auto status = LaunchNow(0, items.size()); !status.ok()) return status;
  return Finish();
}

// The buffers are the next run's: a kernel of an earlier one would read where the other's items lie.
absl::Status Digester::Settle() {
  if (!unsettled_) return absl::OkStatus();
  absl::Status status = device_.Synchronize(stream_);
  if (status.ok()) unsettled_ = false;
  return status;
}

}  // namespace residency
