// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/file_source.h"

#include <set>
#include <string>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "mechanisms/file_change.h"
#include "mechanisms/refusal.h"

namespace residency {

// ---- One component. ----

size_t FileSource::IndexOf(uint32_t cell) const {
  ABSL_RAW_CHECK(cell >= first_cell_ && cell - first_cell_ < cells_.size(), "a cell of another component");
  return cell - first_cell_;
}

absl::Status FileSource::ForEachPart(uint32_t cell, PartWriter write) const {
  for (const CellPart& part : cells_[IndexOf(cell)]) {
    if (absl::Status written = write(part); !written.ok()) return written;
  }
  return absl::OkStatus();
}

bool FileSource::Accept(uint32_t cell, uint64_t digest) const {
  std::lock_guard lock(mutex_);
  Digest& own = digests_[IndexOf(cell)];
  if (own.trust == Trust::kUnknown) own = {digest, Trust::kSeen};
  return own.value == digest;
}

bool FileSource::HasDigest(uint32_t cell) const {
  std::lock_guard lock(mutex_);
  return digests_[IndexOf(cell)].trust == Trust::kKnown;
}

absl::Status FileSource::CheckUnchanged() const {
  // Held while the files are asked, so that what is accepted meanwhile is not taken for older than the answer.
  std::lock_guard lock(mutex_);
  absl::Status status;
  for (const SourceFile& file : files_) {
    if (status = residency::CheckUnchanged(file); !status.ok()) break;
  }
  for (Digest& digest : digests_) {
    if (digest.trust == Trust::kSeen) digest.trust = status.ok() ? Trust::kKnown : Trust::kUnknown;
  }
  return status;
}

// ---- All of a model. ----

absl::Status CheckReadOnlyPin(const Device& device) {
  if (device.info().read_only_pin) return absl::OkStatus();
  return Refuse(absl::StatusCode::kFailedPrecondition, "NO_READONLY_PIN",
                absl::StrCat(device.info().name, " (", device.info().uuid,
                             ") does not page-lock memory that may only be read, which the host tier file needs; the "
                             "tier mirror does without"));
}

absl::StatusOr<std::unique_ptr<MappedModel>> MappedModel::Map(const Layout& layout, const Manifest& manifest,
                                                              const Device& device, const MapOptions& options) {
  if (absl::Status able = CheckReadOnlyPin(device); !able.ok()) return able;
  std::unique_ptr<MappedModel> model(new MappedModel());
  const std::vector<FilePiece> pieces = FilePieces(manifest, options.piece_bytes);
  const uint64_t needed_bytes = BytesOf(pieces);
  std::vector<const std::byte*> addresses(manifest.files.size());
  uint64_t pinned_bytes = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const FilePiece& piece = pieces[i];
    if (i == 0 || piece.file != pieces[i - 1].file) {
      auto file = MappedFile::Map(manifest.files[piece.file]);
      if (!file.ok()) return file.status();
      addresses[piece.file] = file->address();
      model->files_.push_back(*std::move(file));
    }
    if (absl::Status pinned = model->files_.back().Pin(device, piece.offset, piece.bytes); !pinned.ok()) {
      if (!absl::IsResourceExhausted(pinned)) return pinned;
      return Refuse(absl::StatusCode::kResourceExhausted,
                    {.reason = "PIN_LIMIT", .needed_bytes = needed_bytes, .available_bytes = pinned_bytes},
                    absl::StrCat("page-locking ", needed_bytes, " bytes of weight files failed after ", pinned_bytes,
                                 " bytes: ", std::string(pinned.message())));
    }
    pinned_bytes += piece.bytes;
    if (options.progress && !options.progress(pinned_bytes)) {
      return Refuse(absl::StatusCode::kCancelled, "CANCELLED", "the mapping of weight files was given up");
    }
  }
  for (uint32_t i = 0; i < layout.components.size(); ++i) {
    std::set<uint32_t> used;
    for (const ManifestTensor& tensor : manifest.components[i].tensors) {
      if (tensor.bytes > 0) used.insert(tensor.file);
    }
    std::vector<SourceFile> files;
    for (uint32_t file : used) files.push_back(manifest.files[file]);
    model->components_.push_back(std::make_unique<FileSource>(std::move(files), layout.components[i].first_cell,
                                                              FileParts(layout, i, manifest, pieces, addresses)));
    // The pages are those of the files as they were when the headers were read, or the caller hears it now.
    if (absl::Status same = model->components_.back()->CheckUnchanged(); !same.ok()) return same;
  }
  return model;
}

std::vector<const Source*> MappedModel::sources() const {
  std::vector<const Source*> sources;
  for (const auto& component : components_) sources.push_back(component.get());
  return sources;
}

uint64_t MappedModel::pinned_bytes() const {
  uint64_t sum = 0;
  for (const MappedFile& file : files_) sum += file.pinned_bytes();
  return sum;
}

}  // namespace residency
