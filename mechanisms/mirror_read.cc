// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/mirror_read.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/mirror_digest.h"
#include "mechanisms/pin_pieces.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

absl::Status CheckSameModel(const Layout& layout, const Manifest& manifest) {
  const auto mismatch = [](const std::string& what) {
    return Refuse(absl::StatusCode::kInvalidArgument, "LAYOUT_MISMATCH",
                  absl::StrCat("layout and manifest are of different models: ", what));
  };
  if (layout.components.size() != manifest.components.size()) return mismatch("the number of components differs");
  for (size_t component = 0; component < layout.components.size(); ++component) {
    const std::vector<LayoutTensor>& placed = layout.components[component].tensors;
    const std::vector<ManifestTensor>& listed = manifest.components[component].tensors;
    if (placed.size() != listed.size()) return mismatch("the number of tensors differs");
    for (size_t i = 0; i < placed.size(); ++i) {
      if (placed[i].name != listed[i].name || placed[i].bytes != listed[i].bytes) return mismatch(listed[i].name);
    }
  }
  return absl::OkStatus();
}

// Where the last tensor ends.
uint64_t TensorsEnd(const LayoutComponent& component) {
  if (component.tensors.empty()) return 0;
  return component.tensors.back().device_offset - component.device_offset + component.tensors.back().bytes;
}

// Digests the zeros behind each tensor, up to the next one or the end of the image.
void AddPadding(const LayoutComponent& component, MirrorDigest& digest) {
  uint64_t covered = 0;
  const auto pad_to = [&](uint64_t offset) {
    const uint64_t begin = AlignUp(covered, sizeof(uint64_t));
    if (begin < offset) digest.AddWords(begin, offset - begin);
  };
  for (const LayoutTensor& tensor : component.tensors) {
    const uint64_t offset = tensor.device_offset - component.device_offset;
    pad_to(offset);
    covered = offset + tensor.bytes;
  }
  pad_to(component.span_bytes);
}

// The image of one component while it is being filled.
class Image {
 public:
  Image(const Layout& layout, uint32_t component_index, MirrorMemory memory)
      : layout_(layout),
        component_(layout.components[component_index]),
        memory_(std::move(memory)),
        digest_(memory_.address(), component_.span_bytes, layout.cell_bytes) {}

  const std::byte* begin() const { return memory_.address(); }
  const LayoutComponent& component() const { return component_; }

  // Has `complete` hear of each piece once all of its bytes are there.
  using PieceComplete = std::function<void(uint64_t offset, std::byte* address, uint64_t bytes)>;
  void OnPiece(uint32_t component_index, PieceComplete complete) {
    pin_pieces_.emplace(layout_, component_index,
                        [this, complete = std::move(complete)](uint64_t offset, uint64_t bytes) {
                          complete(offset, memory_.address() + offset, bytes);
                        });
  }

  // The digest reads the zeros behind the last tensor, and the driver locks them, for which no tensor asks.
  absl::Status PopulateTail() {
    const uint64_t end = TensorsEnd(component_);
    return memory_.Populate(end, component_.span_bytes - end);
  }
  absl::Status Prepare(const std::byte* destination, uint64_t bytes) const {
    return memory_.Populate(static_cast<uint64_t>(destination - memory_.address()), bytes);
  }
  void Copied(const std::byte* destination, uint64_t bytes) {
    const auto offset = static_cast<uint64_t>(destination - memory_.address());
    digest_.Add(offset, bytes);
    if (pin_pieces_.has_value()) pin_pieces_->Add(offset, bytes);
  }

  void AddPieces(const ManifestComponent& listed, std::vector<ReadPiece>& pieces) const {
    for (size_t i = 0; i < listed.tensors.size(); ++i) {
      const uint64_t offset = component_.tensors[i].device_offset - component_.device_offset;
      pieces.push_back({.file = listed.tensors[i].file,
                        .file_offset = listed.tensors[i].file_offset,
                        .bytes = listed.tensors[i].bytes,
                        .destination = memory_.address() + offset});
    }
  }

  // Completes and seals it, after the last byte.
  absl::Status Seal() {
    AddPadding(component_, digest_);
    digests_ = digest_.Finish();
    return memory_.Seal();
  }
  MirrorMemory TakeMemory() { return std::move(memory_); }
  Mirror Finish(std::vector<HostRegistration> pinned) && {
    std::vector<Mirror::Extent> cells;
    for (uint32_t i = 0; i < component_.cell_count; ++i) {
      const LayoutCell& cell = layout_.cells[component_.first_cell + i];
      cells.push_back({cell.device_offset - component_.device_offset, cell.bytes, digests_[i]});
    }
    return Mirror(std::move(memory_), component_.first_cell, std::move(cells), std::move(pinned));
  }

 private:
  const Layout& layout_;
  const LayoutComponent& component_;
  MirrorMemory memory_;
  MirrorDigest digest_;
  std::optional<PinPieces> pin_pieces_;
  std::vector<uint64_t> digests_;
};

// All of a model's, and which one holds an address.
class Images {
 public:
  absl::Status Make(const Layout& layout, std::optional<int> node) {
    for (uint32_t i = 0; i < layout.components.size(); ++i) {
      absl::StatusOr<MirrorMemory> memory =
          MirrorMemory::Make(layout.components[i].name, layout.components[i].span_bytes);
      if (!memory.ok()) return memory.status();
      if (node.has_value()) placed_.Update(memory->Prefer(*node));
      all_.push_back(std::make_unique<Image>(layout, i, *std::move(memory)));
      by_address_.push_back(all_.back().get());
      if (absl::Status ready = all_.back()->PopulateTail(); !ready.ok()) return ready;
    }
    std::sort(by_address_.begin(), by_address_.end(), [](Image* a, Image* b) { return a->begin() < b->begin(); });
    return absl::OkStatus();
  }

  Image& At(const std::byte* address) const {
    const auto after = std::upper_bound(by_address_.begin(), by_address_.end(), address,
                                        [](const std::byte* a, Image* image) { return a < image->begin(); });
    return **std::prev(after);
  }

  // Those of all tensors, as Refill wants them. Components may come out of the same files, and one that was put
  // together from several sources may list its files in another order than the manifest.
  std::vector<ReadPiece> Pieces(const Manifest& manifest) const {
    std::vector<ReadPiece> pieces;
    for (size_t i = 0; i < all_.size(); ++i) all_[i]->AddPieces(manifest.components[i], pieces);
    std::stable_sort(pieces.begin(), pieces.end(), [](const ReadPiece& a, const ReadPiece& b) {
      return a.file != b.file ? a.file < b.file : a.file_offset < b.file_offset;
    });
    return pieces;
  }

  const std::vector<std::unique_ptr<Image>>& all() const { return all_; }
  const absl::Status& placed() const { return placed_; }

 private:
  std::vector<std::unique_ptr<Image>> all_;
  std::vector<Image*> by_address_;
  absl::Status placed_;
};

// What a pinner is to tell, with a flow told of it too.
PinCallbacks PinCallbacksOf(const MirrorOptions& options, const std::vector<const std::byte*>& images) {
  PinCallbacks callbacks = options.pin;
  if (MirrorFlow* const flow = options.flow; flow != nullptr) {
    callbacks.locked = [flow, images](size_t component, const std::byte* address, uint64_t bytes) {
      flow->Locked(static_cast<uint32_t>(component), static_cast<uint64_t>(address - images[component]), bytes);
    };
    callbacks.give_back = [flow](std::vector<HostRegistration> pinned) { flow->GiveBack(std::move(pinned)); };
  }
  return callbacks;
}

absl::StatusOr<MirrorSet> Read(const Manifest& manifest, const MirrorOptions& options, const Images& images,
                               std::optional<Pinner>& pinner) {
  const RefillCallbacks callbacks = {
      .prepare = [&](std::byte* destination,
                     uint64_t bytes) { return images.At(destination).Prepare(destination, bytes); },
      .copied = [&](std::byte* destination, uint64_t bytes) { images.At(destination).Copied(destination, bytes); },
      .progress = options.progress};
  absl::StatusOr<RefillReport> report = Refill(manifest.files, images.Pieces(manifest), options.refill, callbacks);
  if (!report.ok()) return report.status();
  // While the last piece is being locked.
  for (const auto& image : images.all()) {
    if (absl::Status sealed = image->Seal(); !sealed.ok()) return sealed;
  }
  std::vector<std::vector<HostRegistration>> pinned(images.all().size());
  if (pinner.has_value()) {
    absl::StatusOr<std::vector<Pinner::Pinned>> pieces = pinner->Finish();
    if (absl::IsCancelled(pieces.status())) return pieces.status();
    if (pieces.ok()) {
      for (Pinner::Pinned& piece : *pieces) pinned[piece.owner].push_back(std::move(piece.registration));
    }
  }
  MirrorSet set{.mirrors = {}, .report = *report, .placed = images.placed()};
  for (size_t i = 0; i < images.all().size(); ++i) {
    set.mirrors.push_back(std::move(*images.all()[i]).Finish(std::move(pinned[i])));
  }
  return set;
}

}  // namespace

absl::StatusOr<MirrorSet> ReadMirrors(const Layout& layout, const Manifest& manifest, const MirrorOptions& options) {
  if (absl::Status same = CheckSameModel(layout, manifest); !same.ok()) return same;
  Images images;
  if (absl::Status made = images.Make(layout, options.node); !made.ok()) return made;
  std::vector<const std::byte*> begins;
  for (const auto& image : images.all()) begins.push_back(image->begin());
  std::optional<Pinner> pinner;  // after the images, so that it goes first
  if (options.pin_for != nullptr) pinner.emplace(*options.pin_for, PinCallbacksOf(options, begins));
  MirrorFlow* const flow = options.flow;
  if (flow != nullptr) flow->Begin(begins, /*locks=*/pinner.has_value());
  for (uint32_t i = 0; i < images.all().size() && (flow != nullptr || pinner.has_value()); ++i) {
    images.all()[i]->OnPiece(i, [flow, &pinner, i](uint64_t offset, std::byte* address, uint64_t bytes) {
      if (flow != nullptr) flow->Complete(i, offset, bytes);
      if (pinner.has_value()) pinner->Add(i, address, bytes);
    });
  }
  absl::StatusOr<MirrorSet> set = Read(manifest, options, images, pinner);
  if (set.ok() || flow == nullptr) return set;
  MirrorRemains remains;
  if (pinner.has_value()) remains.pinned = pinner->Stop();
  for (const auto& image : images.all()) remains.memory.push_back(image->TakeMemory());
  flow->Fail(set.status(), std::move(remains));
  return set;
}

}  // namespace residency
