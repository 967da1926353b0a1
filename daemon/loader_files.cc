// SPDX-License-Identifier: Apache-2.0
//
// The loader's part for the host tier `file`, and what a host copy of either tier is to the broker.
#include <algorithm>
#include <utility>

#include "daemon/loader.h"
#include "mechanisms/refusal.h"

namespace residency {

std::vector<const Source*> BuiltMirrors::sources() const {
  if (mapped != nullptr) return mapped->sources();
  std::vector<const Source*> sources;
  for (const Mirror& mirror : mirrors) sources.push_back(&mirror);
  return sources;
}

uint64_t BuiltMirrors::pinned_bytes() const {
  uint64_t sum = mapped != nullptr ? mapped->pinned_bytes() : 0;
  for (const Mirror& mirror : mirrors) sum += mirror.pinned_bytes();
  return sum;
}

uint64_t BuiltMirrors::host_bytes() const {
  // Page cache that is locked no longer is as good as free.
  uint64_t sum = mapped != nullptr ? mapped->pinned_bytes() : 0;
  for (const Mirror& mirror : mirrors) sum += mirror.bytes();
  return sum;
}

void Loader::MapFiles(const Checkpoint& checkpoint, const Device& device, std::function<uint64_t()> pinned_bytes,
                      const std::atomic<bool>& cancelled, std::function<void(const BuildProgress&)> progress,
                      std::function<void(BuiltMirrors)> done) {
  NextWorker().Post([this, &checkpoint, &device, pinned_bytes = std::move(pinned_bytes), &cancelled,
                     progress = std::move(progress), done = std::move(done)]() mutable {
    BuiltMirrors built;
    MapOptions options;
    options.progress = [&](uint64_t locked_bytes) {
      // Whole pages are locked, so more than the tensors have.
      const uint64_t bytes = std::min(locked_bytes, checkpoint.layout.payload_bytes);
      decision_.Post([progress, so_far = BuildProgress{bytes, locked_bytes}] { progress(so_far); });
      return !cancelled && !stopping_;
    };
    auto mapped = MappedModel::Map(checkpoint.layout, checkpoint.manifest, device, options);
    built.status = mapped.status();
    if (mapped.ok() && !cancelled) {
      built.mapped = *std::move(mapped);
    } else if (mapped.ok()) {
      built.status = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "the registration was given up");
      mapped = built.status;  // and what was locked is unlocked before anybody is told
    } else if (ReasonOf(built.status) == "PIN_LIMIT") {
      built.pin_limit_bytes = pinned_bytes() + GetRefusal(built.status)->available_bytes.value_or(0);
    }
    decision_.Post([built = std::move(built), done = std::move(done)]() mutable { done(std::move(built)); });
  });
}

}  // namespace residency
