// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

// Two models at once keep a disk busy; each one reads several blocks at a time anyhow.
constexpr int kWorkers = 2;
// A progress message for each of these is a few hundred for a large model.
constexpr uint64_t kProgressStepBytes = 64 * kMiB;

std::string IdentityOf(const Manifest& manifest, const Layout& layout) {
  std::string identity = absl::StrCat(absl::Hex(layout.digest, absl::kZeroPad16));
  for (const SourceFile& file : manifest.files) {
    absl::StrAppend(&identity, "|", file.device, ":", file.inode, ":", file.bytes, ":", file.mtime_ns);
  }
  for (const ManifestComponent& component : manifest.components) {
    for (const ManifestTensor& tensor : component.tensors) {
      absl::StrAppend(&identity, "|", tensor.file, "+", tensor.file_offset);
    }
  }
  return identity;
}

absl::StatusOr<Checkpoint> ReadCheckpoint(const std::string& source, const std::vector<ComponentSource>& components,
                                          uint64_t cell_bytes, uint64_t granule_bytes) {
  auto manifest = ReadManifest(source, components);
  if (!manifest.ok()) return manifest.status();
  auto layout = MakeLayout(ToLayoutComponents(*manifest), cell_bytes, granule_bytes);
  if (!layout.ok()) return layout.status();
  std::string identity = IdentityOf(*manifest, *layout);
  return Checkpoint{*std::move(manifest), *std::move(layout), std::move(identity)};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Loader>> Loader::Start(Loop& decision, uint64_t cell_bytes) {
  std::unique_ptr<Loader> loader(new Loader(decision, cell_bytes));
  for (int i = 0; i < kWorkers; ++i) {
    auto worker = Loop::Start(absl::StrCat("disk-", i));
    if (!worker.ok()) return worker.status();
    loader->workers_.push_back(*std::move(worker));
  }
  auto returns = Loop::Start("returns");
  if (!returns.ok()) return returns.status();
  loader->returns_ = *std::move(returns);
  auto headers = Loop::Start("headers");
  if (!headers.ok()) return headers.status();
  loader->headers_ = *std::move(headers);
  return loader;
}

Loader::~Loader() { stopping_ = true; }

void Loader::Run(Loop::Task work, Loop::Task done) {
  returns_->Post([this, work = std::move(work), done = std::move(done)]() mutable {
    work();
    decision_.Post(std::move(done));
  });
}

Loop& Loader::NextWorker() { return *workers_[next_worker_++ % workers_.size()]; }

void Loader::ReadHeaders(std::string source, std::vector<ComponentSource> components, uint64_t granule_bytes,
                         std::function<void(absl::StatusOr<Checkpoint>)> done) {
  headers_->Post([this, source = std::move(source), components = std::move(components), granule_bytes,
                  done = std::move(done)]() mutable {
    auto checkpoint = ReadCheckpoint(source, components, cell_bytes_, granule_bytes);
    decision_.Post(
        [checkpoint = std::move(checkpoint), done = std::move(done)]() mutable { done(std::move(checkpoint)); });
  });
}

namespace {

// Page-locks the mirror that was built last; takes the lock off all of them where that is refused.
absl::Status PinLast(BuiltMirrors& built, uint64_t set_bytes, const Device& device, PinWish pin,
                     const std::function<uint64_t()>& pinned_bytes) {
  const absl::Status refused = built.mirrors.back().Pin(device);
  // A lost device is no limit of the host's.
  if (refused.ok() || ReasonOf(refused) == "DEVICE_LOST") return refused;
  const uint64_t had_bytes = GetRefusal(refused).value_or(Refusal{}).available_bytes.value_or(0);
  uint64_t own_bytes = had_bytes;
  for (const Mirror& mirror : built.mirrors) own_bytes += mirror.pinned_bytes();
  const uint64_t limit_bytes = pinned_bytes() + had_bytes;
  for (Mirror& mirror : built.mirrors) mirror.Unpin();
  built.pin_refusal = refused;
  if (absl::IsResourceExhausted(refused)) {
    built.pin_limit_bytes = limit_bytes;
    built.pin_refusal =
        Refuse(absl::StatusCode::kResourceExhausted,
               {.reason = "PIN_LIMIT", .needed_bytes = set_bytes, .available_bytes = own_bytes},
               absl::StrCat("page-locking a set of ", set_bytes, " bytes of host memory was refused after ", own_bytes,
                            " bytes; the limit met is ", limit_bytes, " bytes, of which others have ",
                            limit_bytes - own_bytes));
  }
  return pin == PinWish::kMust ? built.pin_refusal : absl::OkStatus();
}

}  // namespace

void Loader::BuildMirrors(const Checkpoint& checkpoint, const Device& device, PinWish pin,
                          std::function<uint64_t()> pinned_bytes, const std::atomic<bool>& cancelled,
                          std::function<void(uint64_t)> progress, std::function<void(BuiltMirrors)> done) {
  NextWorker().Post([this, &checkpoint, &device, pin, pinned_bytes = std::move(pinned_bytes), &cancelled,
                     progress = std::move(progress), done = std::move(done)]() mutable {
    BuiltMirrors built;
    uint64_t before_bytes = 0;
    uint64_t reported_bytes = 0;
    for (uint32_t component = 0; component < checkpoint.layout.components.size() && built.status.ok(); ++component) {
      MirrorOptions options;
      options.progress = [&](uint64_t done_bytes) {
        const uint64_t bytes = before_bytes + done_bytes;
        if (bytes >= reported_bytes + kProgressStepBytes) {
          reported_bytes = bytes;
          decision_.Post([progress, bytes] { progress(bytes); });
        }
        return !cancelled && !stopping_;
      };
      auto mirror = Mirror::Build(checkpoint.layout, component, checkpoint.manifest, options);
      built.status = mirror.status();
      if (!built.status.ok()) break;
      built.mirrors.push_back(*std::move(mirror));
      before_bytes += checkpoint.layout.components[component].payload_bytes;
      // Once refused, the rest is not tried: a set is locked as a whole.
      if (pin == PinWish::kNo || !built.pin_refusal.ok()) continue;
      built.status = PinLast(built, checkpoint.layout.span_bytes, device, pin, pinned_bytes);
    }
    if (built.status.ok() && cancelled) {
      built.status = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "the registration was given up");
    }
    if (!built.status.ok()) built.mirrors.clear();
    decision_.Post([built = std::move(built), done = std::move(done)]() mutable { done(std::move(built)); });
  });
}

}  // namespace residency
