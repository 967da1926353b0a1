// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/mirror_flow.h"

#include <iterator>
#include <utility>

#include "mechanisms/refusal.h"

namespace residency {
namespace {

absl::Status Stopped() {
  return Refuse(absl::StatusCode::kCancelled, "CANCELLED", "nobody waits for these bytes any more");
}

}  // namespace

class MirrorFlow::Component final : public Source {
 public:
  Component(MirrorFlow& flow, uint32_t index) : flow_(flow), index_(index) {}

  absl::Status AwaitCell(uint32_t cell, std::stop_token stop) const override { return flow_.AwaitCell(cell, stop); }
  absl::Status AwaitEnd(std::stop_token stop) const override { return flow_.AwaitEnd(stop); }
  absl::Status ForEachPart(uint32_t cell, PartWriter write) const override { return write(flow_.PartOf(index_, cell)); }
  bool Accept(uint32_t cell, uint64_t digest) const override {
    const Source* mirror = flow_.MirrorOf(index_);
    return mirror != nullptr && mirror->Accept(cell, digest);
  }
  bool HasDigest(uint32_t) const override { return true; }
  absl::Status CheckUnchanged() const override { return flow_.status(); }

 private:
  MirrorFlow& flow_;
  const uint32_t index_;
};

MirrorFlow::MirrorFlow(const Layout& layout) {
  for (uint32_t i = 0; i < layout.components.size(); ++i) {
    const LayoutComponent& component = layout.components[i];
    components_.push_back(std::make_unique<Component>(*this, i));
    first_cells_.push_back(component.first_cell);
    for (uint32_t cell = component.first_cell; cell < component.first_cell + component.cell_count; ++cell) {
      cells_.push_back({layout.cells[cell].device_offset - component.device_offset, layout.cells[cell].bytes});
    }
  }
  first_cells_.push_back(static_cast<uint32_t>(cells_.size()));
}

MirrorFlow::~MirrorFlow() = default;

std::vector<const Source*> MirrorFlow::sources() const {
  std::vector<const Source*> sources;
  for (const auto& component : components_) sources.push_back(component.get());
  return sources;
}

void MirrorFlow::Begin(std::vector<const std::byte*> images, bool locks) {
  std::lock_guard lock(mutex_);
  images_ = std::move(images);
  locks_ = locks;
}

void MirrorFlow::Mark(uint32_t component, uint64_t offset, uint64_t bytes, Having what) {
  std::lock_guard lock(mutex_);
  for (uint32_t cell = first_cells_[component]; cell < first_cells_[component + 1]; ++cell) {
    if (cells_[cell].offset >= offset && cells_[cell].offset < offset + bytes) cells_[cell].has |= what;
  }
  changed_.notify_all();
}

void MirrorFlow::GiveBack(std::vector<HostRegistration> pinned) {
  std::unique_lock lock(mutex_);
  locks_ = false;
  if (given_out_) {
    std::move(pinned.begin(), pinned.end(), std::back_inserter(kept_.pinned));
  } else {
    // A copy out of memory that is just being unlocked is neither the one kind of copy nor the other.
    giving_back_ = true;
    lock.unlock();
    pinned.clear();
    lock.lock();
    giving_back_ = false;
  }
  changed_.notify_all();
}

void MirrorFlow::Fail(const absl::Status& status, MirrorRemains remains) {
  std::lock_guard lock(mutex_);
  status_.Update(status);
  changed_.notify_all();
  // Else they go when this returns; the lock is let go of before that.
  if (!given_out_) return;
  std::move(remains.memory.begin(), remains.memory.end(), std::back_inserter(kept_.memory));
  std::move(remains.mirrors.begin(), remains.mirrors.end(), std::back_inserter(kept_.mirrors));
  std::move(remains.pinned.begin(), remains.pinned.end(), std::back_inserter(kept_.pinned));
}

void MirrorFlow::Deliver(std::vector<Mirror> mirrors) {
  std::lock_guard lock(mutex_);
  kept_.mirrors = std::move(mirrors);
}

std::vector<Mirror> MirrorFlow::TakeMirrors() {
  std::lock_guard lock(mutex_);
  return std::exchange(kept_.mirrors, {});
}

void MirrorFlow::Finish(std::vector<const Source*> mirrors) {
  std::lock_guard lock(mutex_);
  mirrors_ = std::move(mirrors);
  changed_.notify_all();
}

absl::Status MirrorFlow::AwaitCell(uint32_t cell, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  const bool came = changed_.wait(lock, stop, [&] {
    if (!status_.ok() || !mirrors_.empty()) return true;
    const uint8_t needed = locks_ ? kComplete | kLocked : kComplete;
    return !images_.empty() && !giving_back_ && (cells_[cell].has & needed) == needed;
  });
  if (!came) return Stopped();
  if (status_.ok()) given_out_ = true;
  return status_;
}

absl::Status MirrorFlow::AwaitEnd(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  const bool came = changed_.wait(lock, stop, [this] { return !status_.ok() || !mirrors_.empty(); });
  return came ? status_ : Stopped();
}

const Source* MirrorFlow::MirrorOf(uint32_t component) const {
  std::lock_guard lock(mutex_);
  return mirrors_.empty() ? nullptr : mirrors_[component];
}

CellPart MirrorFlow::PartOf(uint32_t component, uint32_t cell) const {
  std::lock_guard lock(mutex_);
  return {.offset = 0, .bytes = cells_[cell].bytes, .data = images_[component] + cells_[cell].offset};
}

absl::Status MirrorFlow::status() const {
  std::lock_guard lock(mutex_);
  return status_;
}

}  // namespace residency
