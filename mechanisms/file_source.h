// SPDX-License-Identifier: Apache-2.0
//
// The host tier `file`: a model whose cells are filled from its weight files themselves, mapped and page-locked for
// reading. It costs no second copy in memory and is ready as soon as the pages are locked, since no byte is read by the
// processor; so nothing is known of the bytes before a device has digested them. The first activation's digests count
// as right where the files' stat is that of the registration afterwards, and later ones are held against them.
//
// For files that nobody rewrites. What happens if somebody does:
//  - truncated, written to, or replaced by another file: the stat differs, which refuses the next activation; locked
//    pages keep a card's copy from faulting, so one that is under way ends, and is refused by the stat after it;
//  - written to with the time of the last write put back: the digests differ, but for the first activation.
//
// Threads: Map blocks and is for a worker; afterwards any.
#ifndef RESIDENCY_MECHANISMS_FILE_SOURCE_H_
#define RESIDENCY_MECHANISMS_FILE_SOURCE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/device.h"
#include "mechanisms/file_parts.h"
#include "mechanisms/layout.h"
#include "mechanisms/manifest.h"
#include "mechanisms/mapped_file.h"
#include "mechanisms/source.h"

namespace residency {

// One component.
class FileSource final : public Source {
 public:
  // `files` are those that its tensors lie in, `cells` the parts of its cells.
  FileSource(std::vector<SourceFile> files, uint32_t first_cell, std::vector<std::vector<CellPart>> cells)
      : files_(std::move(files)), first_cell_(first_cell), cells_(std::move(cells)), digests_(cells_.size()) {}

  absl::Status AwaitCell(uint32_t, std::stop_token) const override { return absl::OkStatus(); }
  absl::Status AwaitEnd(std::stop_token) const override { return absl::OkStatus(); }
  absl::Status ForEachPart(uint32_t cell, PartWriter write) const override;
  bool Accept(uint32_t cell, uint64_t digest) const override;
  bool HasDigest(uint32_t cell) const override;
  // FAILED_PRECONDITION/FILE_CHANGED, NOT_FOUND/FILE_MISSING, UNREADABLE: see file_change.h. What was accepted for the
  // first time before then is forgotten.
  absl::Status CheckUnchanged() const override;

 private:
  enum class Trust : uint8_t { kUnknown, kSeen, kKnown };
  struct Digest {
    uint64_t value = 0;
    Trust trust = Trust::kUnknown;
  };

  size_t IndexOf(uint32_t cell) const;

  const std::vector<SourceFile> files_;
  const uint32_t first_cell_;
  const std::vector<std::vector<CellPart>> cells_;
  mutable std::mutex mutex_;  // device loops of several GPUs share a source
  mutable std::vector<Digest> digests_;
};

// OK, or FAILED_PRECONDITION/NO_READONLY_PIN: the GPU's driver does not page-lock memory that may only be read.
absl::Status CheckReadOnlyPin(const Device& device);

struct MapOptions {
  // Most bytes that are page-locked by one call; whole pages.
  uint64_t piece_bytes = kFilePieceBytes;
  // How many bytes are page-locked, after each call; false cancels. May be empty.
  std::function<bool(uint64_t pinned_bytes)> progress;
};

// All of a model.
class MappedModel {
 public:
  // Maps the manifest's files and page-locks what tensors lie in; the layout was made of this manifest. `device`
  // outlives it. On failure nothing stays.
  // As CheckReadOnlyPin and MappedFile; RESOURCE_EXHAUSTED/PIN_LIMIT with the bytes that all of it needs and those
  // that could be had; CANCELLED/CANCELLED.
  static absl::StatusOr<std::unique_ptr<MappedModel>> Map(const Layout& layout, const Manifest& manifest,
                                                          const Device& device, const MapOptions& options);

  // Of each component, as in the layout.
  std::vector<const Source*> sources() const;
  uint64_t pinned_bytes() const;

 private:
  MappedModel() = default;

  std::vector<MappedFile> files_;
  std::vector<std::unique_ptr<FileSource>> components_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_FILE_SOURCE_H_
