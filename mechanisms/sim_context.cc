// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_context.h"

#include <algorithm>
#include <utility>

#include "mechanisms/units.h"

namespace residency {
namespace {

template <typename Handle>
uintptr_t Number(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle);
}

// Fresh cuMemAlloc memory holds anything on a card. Its first bytes are made unlike zero, so that code that counts on
// zeros is caught here too; filling all of a large allocation would take pages that nobody uses.
constexpr unsigned char kGarbage = 0xA5;
constexpr uint64_t kGarbageBytes = kSimGranuleBytes;

}  // namespace

SimContext::SimContext(SimCard& card, SimAddressSpace& space, SimHostRegistry& hosts, uint64_t context_bytes,
                       uint64_t link_bytes_per_second)
    : card_(card),
      space_(space),
      hosts_(hosts),
      context_bytes_(context_bytes),
      to_device_(link_bytes_per_second),
      to_host_(link_bytes_per_second) {}

CUresult SimContext::Retain() {
  std::lock_guard lock(mutex_);
  if (retained_ == 0) {
    // Also one of no bytes, which shows that this process has a context.
    absl::StatusOr<UniqueFd> charge = card_.Take(SimCard::Kind::kCharge, context_bytes_);
    if (!charge.ok()) {
      return absl::IsResourceExhausted(charge.status()) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
    }
    charge_ = *std::move(charge);
    active_ = true;
  }
  ++retained_;
  return CUDA_SUCCESS;
}

CUresult SimContext::Release() {
  std::lock_guard lock(mutex_);
  if (retained_ == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--retained_ != 0) return CUDA_SUCCESS;
  active_ = false;
  std::vector<std::shared_ptr<SimStream>> streams;
  if (default_stream_) streams.push_back(std::exchange(default_stream_, nullptr));
  for (auto& [handle, stream] : streams_) streams.push_back(std::move(stream));
  streams_.clear();
  for (const std::shared_ptr<SimStream>& stream : streams) {
    stream->Mark()->Wait();
    stream->Close();
  }
  for (const CUdeviceptr address : plain_) space_.UnmapAnywhere(address);
  plain_.clear();
  events_.clear();
  modules_.clear();
  hosts_.DropAll(card_.index());
  charge_.reset();
  health_.Clear();
  return CUDA_SUCCESS;
}

CUresult SimContext::CreateStream(unsigned int flags, CUstream* stream) {
  if ((flags & ~static_cast<unsigned int>(CU_STREAM_NON_BLOCKING)) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  const uintptr_t handle = NextHandle();
  streams_[handle] = SimStream::Start(health_, (flags & CU_STREAM_NON_BLOCKING) == 0);
  *stream = reinterpret_cast<CUstream>(handle);
  return CUDA_SUCCESS;
}

CUresult SimContext::DestroyStream(CUstream stream) {
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(Number(stream));
  if (found == streams_.end()) return CUDA_ERROR_INVALID_HANDLE;
  found->second->Close();
  streams_.erase(found);
  return CUDA_SUCCESS;
}

std::shared_ptr<SimStream> SimContext::FindStream(CUstream stream) {
  std::lock_guard lock(mutex_);
  if (stream == nullptr || stream == CU_STREAM_LEGACY) return DefaultStream();
  const auto found = streams_.find(Number(stream));
  return found == streams_.end() ? nullptr : found->second;
}

std::shared_ptr<SimStream> SimContext::DefaultStream() {
  if (!default_stream_) default_stream_ = SimStream::Start(health_, true);
  return default_stream_;
}

void SimContext::KeepLegacyOrder(SimStream& stream) {
  if (!stream.blocking() || !default_stream_) return;
  if (&stream != default_stream_.get()) {
    if (!default_stream_->Idle()) stream.WaitFor(default_stream_->Mark());
    return;
  }
  for (const auto& [handle, other] : streams_) {
    if (other->blocking() && !other->Idle()) stream.WaitFor(other->Mark());
  }
}

void SimContext::Do(SimStream& stream, SimStream::Work work) {
  std::lock_guard lock(mutex_);
  KeepLegacyOrder(stream);
  stream.Do(std::move(work));
}

std::shared_ptr<SimMarker> SimContext::Mark(SimStream& stream) {
  std::lock_guard lock(mutex_);
  KeepLegacyOrder(stream);
  return stream.Mark();
}

void SimContext::WaitFor(SimStream& stream, std::shared_ptr<SimMarker> marker) {
  std::lock_guard lock(mutex_);
  KeepLegacyOrder(stream);
  stream.WaitFor(std::move(marker));
}

std::vector<std::shared_ptr<SimMarker>> SimContext::MarkAll() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<SimMarker>> markers;
  if (default_stream_) markers.push_back(default_stream_->Mark());
  for (const auto& [handle, stream] : streams_) markers.push_back(stream->Mark());
  return markers;
}

CUevent SimContext::CreateEvent(bool timing) {
  std::lock_guard lock(mutex_);
  const uintptr_t handle = NextHandle();
  events_[handle].timing = timing;
  return reinterpret_cast<CUevent>(handle);
}

CUresult SimContext::DestroyEvent(CUevent event) {
  std::lock_guard lock(mutex_);
  return events_.erase(Number(event)) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult SimContext::SetMarker(CUevent event, std::shared_ptr<SimMarker> marker) {
  std::lock_guard lock(mutex_);
  const auto found = events_.find(Number(event));
  if (found == events_.end()) return CUDA_ERROR_INVALID_HANDLE;
  found->second.marker = std::move(marker);
  return CUDA_SUCCESS;
}

CUresult SimContext::FindEvent(CUevent event, SimEvent* found) {
  std::lock_guard lock(mutex_);
  const auto entry = events_.find(Number(event));
  if (entry == events_.end()) return CUDA_ERROR_INVALID_HANDLE;
  *found = entry->second;
  return CUDA_SUCCESS;
}

CUmodule SimContext::LoadModule() {
  std::lock_guard lock(mutex_);
  const uintptr_t handle = NextHandle();
  modules_.insert(handle);
  return reinterpret_cast<CUmodule>(handle);
}

CUresult SimContext::UnloadModule(CUmodule module) {
  std::lock_guard lock(mutex_);
  return modules_.erase(Number(module)) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

bool SimContext::HasModule(CUmodule module) {
  std::lock_guard lock(mutex_);
  return modules_.count(Number(module)) != 0;
}

CUresult SimContext::AllocatePlain(uint64_t bytes, CUdeviceptr* address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > card_.total_bytes()) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t taken_bytes = AlignUp(bytes, kSimGranuleBytes);
  absl::StatusOr<UniqueFd> file = card_.Take(SimCard::Kind::kMemory, taken_bytes);
  if (!file.ok()) {
    return absl::IsResourceExhausted(file.status()) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
  }
  auto allocation = std::make_shared<SimAllocation>(card_, taken_bytes, *std::move(file));
  if (CUresult result = space_.MapAnywhere(std::move(allocation), address); result != CUDA_SUCCESS) return result;
  SimFill(space_, card_.index(), *address, kGarbage, std::min(bytes, kGarbageBytes));
  std::lock_guard lock(mutex_);
  plain_.insert(*address);
  return CUDA_SUCCESS;
}

CUresult SimContext::FreePlain(CUdeviceptr address) {
  std::vector<std::shared_ptr<SimStream>> streams;
  {
    std::lock_guard lock(mutex_);
    if (plain_.erase(address) == 0) return CUDA_ERROR_INVALID_VALUE;
    if (default_stream_) streams.push_back(default_stream_);
    for (const auto& [handle, stream] : streams_) streams.push_back(stream);
  }
  // cuMemFree waits for the device; a marker per stream is the same.
  for (const std::shared_ptr<SimStream>& stream : streams) stream->Mark()->Wait();
  return space_.UnmapAnywhere(address);
}

}  // namespace residency
