// SPDX-License-Identifier: Apache-2.0
//
// Which host memory of this process is registered with the simulated driver. Nothing is locked in memory:
// only the rules are kept, which for mappings of files are those that an H200's driver was seen to have. Any thread.
#ifndef RESIDENCY_MECHANISMS_SIM_HOST_REGISTRY_H_
#define RESIDENCY_MECHANISMS_SIM_HOST_REGISTRY_H_

#include <cuda.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace residency {

class SimHostRegistry {
 public:
  enum class Range { kRegistered, kRegisteredFile, kPageable, kMixed };

  // No limit where `pin_limit_bytes` is empty.
  explicit SimHostRegistry(std::optional<uint64_t> pin_limit_bytes) : pin_limit_bytes_(pin_limit_bytes) {}

  // Answers as cuMemHostRegister. `card_index` is the card whose context registers. Pages of a file are registered for
  // reading only, shared ones. (Those of a private mapping spin in the real driver for ever; here they are refused.)
  CUresult Register(const void* begin, uint64_t bytes, bool read_only, int card_index);
  CUresult Unregister(const void* begin);
  // Drops what the context of that card registered, as the end of a context does.
  void DropAll(int card_index);

  // kRegistered: all of it lies in one registration, and in a writable one where `for_writing`; kRegisteredFile: the
  // same, and its pages are a file's, which somebody may cut while a card would still have them.
  // kPageable: none of it is registered. A copy of anything between is refused by the real driver.
  Range Classify(const void* begin, uint64_t bytes, bool for_writing) const;

 private:
  struct Registration {
    uint64_t bytes;
    bool read_only;
    bool file;
    int card_index;
  };

  const std::optional<uint64_t> pin_limit_bytes_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Registration> registrations_;  // by first address
  uint64_t registered_bytes_ = 0;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_HOST_REGISTRY_H_
