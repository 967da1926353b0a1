// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/busy_kernel.h"

#include <utility>
#include <vector>

#include "mechanisms/digest.h"

namespace residency {
namespace {

constexpr uint32_t kBlocks = 1056;  // fills any GPU that we know

}  // namespace

absl::StatusOr<std::unique_ptr<BusyKernel>> BusyKernel::Make(const Device& device, uint64_t buffer_bytes) {
  std::unique_ptr<BusyKernel> busy(new BusyKernel(device, buffer_bytes));
  if (auto status = busy->LoadKernel(); !status.ok()) return status;
  if (auto status = busy->FillItems(); !status.ok()) return status;
  return busy;
}

absl::Status BusyKernel::LoadKernel() {
  if (auto status = device_.MakeCurrent(); !status.ok()) return status;
  const Driver& driver = device_.driver();
  CUmodule module = nullptr;
  auto status = device_.Check(driver.cuModuleLoadData(&module, DigestFatbin().data()), "cuModuleLoadData");
  if (!status.ok()) return status;
  return device_.Check(driver.cuModuleGetFunction(&kernel_, module, kDigestKernel), "cuModuleGetFunction");
}

absl::Status BusyKernel::FillItems() {
  auto stream = device_.CreateStream();
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  for (StreamEvent& ended : ended_) {
    auto event = device_.CreateEvent();
    if (!event.ok()) return event.status();
    ended = *std::move(event);
  }
  for (auto [buffer, bytes] : {std::pair{&buffer_, buffer_bytes_},
                               {&items_, kItems * sizeof(DigestItem)},
                               {&sums_, kItems * sizeof(uint64_t)}}) {
    auto made = device_.Allocate(bytes);
    if (!made.ok()) return made.status();
    *buffer = *std::move(made);
    if (auto status = device_.Zero(buffer->get(), bytes, stream_); !status.ok()) return status;
  }
  const DigestItem once{.address = buffer_.get(), .word_count = buffer_bytes_ / 8, .first_index = 0};
  const std::vector<DigestItem> items(kItems, once);
  auto status = device_.CopyToDevice(items_.get(), items.data(), kItems * sizeof(DigestItem), stream_);
  return status.ok() ? device_.Synchronize(stream_) : status;
}

absl::Status BusyKernel::Launch() {
  CUdeviceptr items = items_.get();
  CUdeviceptr sums = sums_.get();
  uint32_t count = kItems;
  void* parameters[] = {&items, &count, &sums};
  const CUresult launched = device_.driver().cuLaunchKernel(kernel_, kBlocks, 1, 1, kDigestThreads, 1, 1, 0,
                                                            stream_.get(), parameters, nullptr);
  if (auto status = device_.Check(launched, "cuLaunchKernel"); !status.ok()) return status;
  const StreamEvent& mine = ended_[launches_ % 2];
  const StreamEvent& before = ended_[(launches_ + 1) % 2];
  if (auto status = device_.Record(mine, stream_); !status.ok()) return status;
  return launches_++ == 0 ? absl::OkStatus() : device_.Synchronize(before);
}

}  // namespace residency
