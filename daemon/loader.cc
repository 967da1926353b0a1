// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/file_parts.h"
#include "mechanisms/numa.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

// Two models at once keep a disk busy; each one reads several blocks at a time anyhow.
constexpr int kWorkers = 2;
// A progress message for each of these is a few hundred for a large model.
constexpr uint64_t kProgressStepBytes = 64 * kMiB;
// A device may be filled once this part is left to be read. Copying a model over the link takes as long as reading a
// 40th of it (55 against 1.3 GB/s on an H200's host), or a 16th from a disk of 3.4 GB/s: then both end together. Not
// more, since whoever else wants the device waits for the disk meanwhile; and from a slow one, not even that much.
constexpr uint64_t kEarlyPart = 16;
constexpr uint64_t kMaxEarlyBytes = kGiB;

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
  const uint64_t file_bytes = BytesOf(FilePieces(*manifest, kFilePieceBytes));
  return Checkpoint{*std::move(manifest), *std::move(layout), file_bytes, std::move(identity)};
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

std::map<int, uint64_t> NodeBytesOf(const std::vector<Mirror>& mirrors) {
  if (MemoryNodes().size() < 2) return {};
  std::vector<std::span<const std::byte>> images;
  for (const Mirror& mirror : mirrors) images.emplace_back(mirror.data(), mirror.bytes());
  return BytesByNode(images).value_or(std::map<int, uint64_t>());
}

// What page-locking a set came to, as its pinner tells it. Once ReadMirrors has returned, for the worker.
class PinReport {
 public:
  PinReport(uint64_t set_bytes, PinWish pin, const std::function<uint64_t()>& pinned_bytes)
      : set_bytes_(set_bytes), pin_(pin), pinned_bytes_(pinned_bytes) {}

  // `own_bytes` of the set are locked, and are counted in what all mirrors have.
  void OnRefused(const absl::Status& status, uint64_t own_bytes) {
    refusal_ = status;
    if (absl::IsResourceExhausted(status)) {
      limit_bytes_ = pinned_bytes_();
      refusal_ = Refuse(absl::StatusCode::kResourceExhausted,
                        {.reason = "PIN_LIMIT", .needed_bytes = set_bytes_, .available_bytes = own_bytes},
                        absl::StrCat("page-locking a set of ", set_bytes_, " bytes of host memory was refused after ",
                                     own_bytes, " bytes; the limit met is ", *limit_bytes_,
                                     " bytes, of which others have ", *limit_bytes_ - own_bytes));
    }
    // A lost device is no limit of the host's.
    fatal_ = pin_ == PinWish::kMust || ReasonOf(status) == "DEVICE_LOST";
  }
  // Whether the rest need not be read. Any thread.
  bool fatal() const { return fatal_; }
  const absl::Status& refusal() const { return refusal_; }
  std::optional<uint64_t> limit_bytes() const { return limit_bytes_; }

 private:
  const uint64_t set_bytes_;
  const PinWish pin_;
  const std::function<uint64_t()>& pinned_bytes_;
  absl::Status refusal_;
  std::optional<uint64_t> limit_bytes_;
  std::atomic<bool> fatal_{false};
};

}  // namespace

void Loader::BuildMirrors(const Checkpoint& checkpoint, const Device& device, PinWish pin,
                          std::function<uint64_t()> pinned_bytes, const std::atomic<bool>& cancelled,
                          std::function<void(const BuildProgress&)> progress, EarlyFill early,
                          std::function<void(BuiltMirrors)> done) {
  NextWorker().Post([this, &checkpoint, &device, pin, pinned_bytes = std::move(pinned_bytes), &cancelled,
                     progress = std::move(progress), early = std::move(early), done = std::move(done)]() mutable {
    PinReport report(checkpoint.layout.span_bytes, pin, pinned_bytes);
    std::atomic<uint64_t> read_bytes{0};
    const auto report_pinned = [&](uint64_t pinned_bytes) {
      decision_.Post([progress, so_far = BuildProgress{read_bytes, pinned_bytes}] { progress(so_far); });
    };
    uint64_t reported_bytes = 0;
    const uint64_t payload_bytes = checkpoint.layout.payload_bytes;
    const uint64_t early_bytes = std::min(payload_bytes / kEarlyPart, kMaxEarlyBytes);
    bool nearly_built = early.flow == nullptr;  // and said so
    MirrorOptions options;
    options.flow = early.flow;
    options.progress = [&](uint64_t done_bytes) {
      read_bytes = done_bytes;
      if (done_bytes >= reported_bytes + kProgressStepBytes || done_bytes == payload_bytes) {
        reported_bytes = done_bytes;
        decision_.Post([progress, done_bytes] { progress({done_bytes, std::nullopt}); });
      }
      if (!nearly_built && payload_bytes - done_bytes <= early_bytes) {
        nearly_built = true;
        decision_.Post(early.nearly_built);
      }
      return !cancelled && !stopping_ && !report.fatal();
    };
    options.node = NodeForDevice(device.info().pci_id);
    if (pin != PinWish::kNo) options.pin_for = &device;
    options.pin.progress = [&](uint64_t pinned_bytes) {
      report_pinned(pinned_bytes);
      return !cancelled && !stopping_;
    };
    options.pin.refused = [&](const absl::Status& status, uint64_t own_bytes) {
      report.OnRefused(status, own_bytes);
      report_pinned(0);
    };
    auto set = ReadMirrors(checkpoint.layout, checkpoint.manifest, options);
    BuiltMirrors built{
        .status = set.status(), .pin_refusal = report.refusal(), .pin_limit_bytes = report.limit_bytes()};
    if (report.fatal() && (set.ok() || absl::IsCancelled(set.status()))) built.status = report.refusal();
    if (built.status.ok() && cancelled) {
      built.status = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "the registration was given up");
    }
    if (built.status.ok()) {
      built.mirrors = std::move(set->mirrors);
      built.node_bytes = NodeBytesOf(built.mirrors);
      built.placed = set->placed;
      // A loop that has ended would drop them with the task, perhaps under a fill.
      if (early.flow != nullptr) early.flow->Deliver(std::move(built.mirrors));
    } else {
      MirrorRemains remains;
      if (set.ok()) remains.mirrors = std::move(set->mirrors);
      if (early.flow != nullptr) early.flow->Fail(built.status, std::move(remains));
      set = built.status;  // and the memory goes before anybody is told
    }
    decision_.Post([built = std::move(built), done = std::move(done)]() mutable { done(std::move(built)); });
  });
}

}  // namespace residency
