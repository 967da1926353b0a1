// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_kernels.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "mechanisms/digest.h"

namespace residency {
namespace {

// The same sum as digest.cu's kernel, item by item.
CUresult DigestKernel(const SimMemory& memory, void** params) {
  const CUdeviceptr items_address = *static_cast<const uint64_t*>(params[0]);
  const uint32_t item_count = *static_cast<const uint32_t*>(params[1]);
  const CUdeviceptr sums_address = *static_cast<const uint64_t*>(params[2]);
  if (item_count == 0) return CUDA_SUCCESS;
  const auto* items = static_cast<const DigestItem*>(memory.Read(items_address, item_count * sizeof(DigestItem)));
  auto* sums = static_cast<uint64_t*>(memory.Write(sums_address, item_count * sizeof(uint64_t)));
  if (items == nullptr || sums == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  for (uint32_t i = 0; i < item_count; ++i) {
    const DigestItem& item = items[i];
    if (item.address % sizeof(uint64_t) != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
    if (item.word_count == 0) continue;
    if (item.word_count > UINT64_MAX / sizeof(uint64_t)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    const void* words = memory.Read(item.address, item.word_count * sizeof(uint64_t));
    if (words == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
    sums[i] += DigestWords(static_cast<const uint64_t*>(words), item.word_count, item.first_index);
  }
  return CUDA_SUCCESS;
}

// Process-wide, as the table is: kernels may be registered before the driver is opened.
struct KernelRegistry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<SimKernelEntry>, std::less<>> entries;

  KernelRegistry() {
    entries[kDigestKernel] = std::make_unique<SimKernelEntry>(
        SimKernelEntry{kDigestKernel, {sizeof(uint64_t), sizeof(uint32_t), sizeof(uint64_t)}, DigestKernel});
  }
};

// Never destroyed: stream threads may run kernels until the process ends.
KernelRegistry& Registry() {
  static KernelRegistry& registry = *new KernelRegistry;
  return registry;
}

// The memory as one launch sees it. What it was given stays mapped until the launch is over.
class LaunchMemory : public SimMemory {
 public:
  LaunchMemory(SimAddressSpace& space, int card_index) : space_(space), card_index_(card_index) {}

  const void* Read(CUdeviceptr address, uint64_t bytes) const override {
    return Get(address, bytes, SimAddressSpace::kRead);
  }
  void* Write(CUdeviceptr address, uint64_t bytes) const override {
    return Get(address, bytes, SimAddressSpace::kReadWrite);
  }

  // True when everything that was given out stayed mapped.
  bool LetGo() {
    bool stayed = true;
    for (SimAddressSpace::Pinned range : pinned_) stayed &= space_.Unpin(range);
    return stayed;
  }

 private:
  void* Get(CUdeviceptr address, uint64_t bytes, int rights) const {
    const auto range = space_.Pin(address, bytes, card_index_, rights);
    if (!range) return nullptr;
    pinned_.push_back(*range);
    return reinterpret_cast<void*>(address);
  }

  SimAddressSpace& space_;
  const int card_index_;
  mutable std::vector<SimAddressSpace::Pinned> pinned_;
};

}  // namespace

void RegisterSimKernel(const std::string& name, std::vector<uint32_t> param_bytes, SimKernel kernel) {
  KernelRegistry& registry = Registry();
  std::lock_guard lock(registry.mutex);
  auto entry = std::make_unique<SimKernelEntry>(SimKernelEntry{name, std::move(param_bytes), std::move(kernel)});
  registry.entries.try_emplace(name, std::move(entry));
}

const SimKernelEntry* FindSimKernel(std::string_view name) {
  KernelRegistry& registry = Registry();
  std::lock_guard lock(registry.mutex);
  const auto found = registry.entries.find(name);
  return found == registry.entries.end() ? nullptr : found->second.get();
}

std::vector<std::vector<unsigned char>> CopySimParams(const SimKernelEntry& entry, void** params) {
  std::vector<std::vector<unsigned char>> copies;
  for (size_t i = 0; i < entry.param_bytes.size(); ++i) {
    const auto* begin = static_cast<const unsigned char*>(params[i]);
    copies.emplace_back(begin, begin + entry.param_bytes[i]);
  }
  return copies;
}

CUresult RunSimKernel(const SimKernelEntry& entry, std::vector<std::vector<unsigned char>> params,
                      SimAddressSpace& space, int card_index) {
  std::vector<void*> pointers;
  for (std::vector<unsigned char>& param : params) pointers.push_back(param.data());
  LaunchMemory memory(space, card_index);
  const CUresult result = entry.kernel(memory, pointers.data());
  const bool stayed = memory.LetGo();
  return result == CUDA_SUCCESS && !stayed ? CUDA_ERROR_ILLEGAL_ADDRESS : result;
}

}  // namespace residency
