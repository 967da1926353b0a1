// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/arena.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const Device& device, CellPool& pool, Digester& digester,
                                                     const Layout& layout, const ArenaOptions& options) {
  AddressRange span;
  if (layout.span_bytes > 0) {
    auto reserved = device.Reserve(layout.span_bytes);
    if (!reserved.ok()) return reserved.status();
    span = *std::move(reserved);
  }
  auto stream = device.CreateStream();
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<Arena>(
      new Arena(device, pool, digester, layout, options, std::move(span), *std::move(stream)));
}

Arena::~Arena() {
  RealizeReport report;
  // One after the other, so that a cell which the driver does not let go of does not keep the rest. Such a one is lost
  // with its address until the context goes.
  for (uint32_t cell : MappedCells()) (void)Remove({cell}, report);
}

absl::StatusOr<RealizeReport> Arena::Realize(const Plan& plan, std::span<const Source* const> sources,
                                             const RealizeOptions& options) {
  if (broken_ && Price(layout_, plan) != 0) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "BROKEN",
                  "an earlier transition of this model failed and could not be undone");
  }
  const Plan before = CurrentPlan();
  RealizeReport report;
  const absl::Status status = Apply(plan, sources, options, report);
  if (status.ok()) return report;
  if (!broken_ && !Undo(before, sources).ok()) broken_ = true;
  return status;
}

absl::Status Arena::Undo(const Plan& before, std::span<const Source* const> sources, std::stop_token stop) {
  RealizeReport report;
  if (auto status = Apply(before, sources, {.stop = std::move(stop)}, report); !status.ok()) return status;
  // What came back was verified as it came; this is about the cells that stayed.
  return Mend(sources);
}

// Refills what is wrong of all the cells that are mapped.
absl::Status Arena::Mend(std::span<const Source* const> sources) {
  const auto wrong = FindWrong(MappedCells(), sources);
  return wrong.ok() ? Refill(*wrong, sources) : wrong.status();
}

absl::Status Arena::Empty() {
  RealizeReport report;
  return Apply(NoneResident(layout_), {}, {}, report);
}

absl::Status Arena::Return(const Plan& before, std::span<const Source* const> sources, std::stop_token stop) {
  absl::Status status = Undo(before, sources, std::move(stop));
  if (!status.ok()) broken_ = true;
  return status;
}

absl::Status Arena::Apply(const Plan& plan, std::span<const Source* const> sources, const RealizeOptions& options,
                          RealizeReport& report) {
  std::vector<uint32_t> leaving;
  std::vector<uint32_t> coming;
  for (uint32_t cell = 0; cell < layout_.cells.size(); ++cell) {
    const bool wanted = plan.cells[cell] == CellResidency::kResident;
    const bool there = mapped_.contains(cell);
    if (there && !wanted) leaving.push_back(cell);
    if (!there && wanted) coming.push_back(cell);
  }
  if (auto status = Remove(leaving, report); !status.ok()) return status;
  if (auto status = Add(coming, sources, options, report); !status.ok()) return status;
  const Footprint footprint = Measure();
  if (!footprint.status.ok()) return footprint.status;
  const uint64_t measured_bytes = footprint.device_bytes;
  report.device_bytes = measured_bytes;
  const uint64_t priced_bytes = Price(layout_, plan);
  if (measured_bytes != priced_bytes) {
    return Refuse(absl::StatusCode::kInternal, "FOOTPRINT",
                  absl::StrCat("the plan is priced at ", priced_bytes, " bytes, the driver shows ", measured_bytes));
  }
  return absl::OkStatus();
}

// Waits for copies and digests that may still be under way.
absl::Status Arena::Settle() {
  if (!busy_) return absl::OkStatus();
  absl::Status status = device_.Synchronize(stream_);
  if (absl::Status digested = digester_.Settle(); status.ok()) status = digested;
  if (status.ok()) busy_ = false;
  return status;
}

absl::Status Arena::Remove(const std::vector<uint32_t>& cells, RealizeReport& report) {
  if (auto status = Settle(); !status.ok()) return status;
  for (size_t first = 0; first < cells.size();) {
    size_t last = first;
    while (last + 1 < cells.size() && cells[last + 1] == cells[last] + 1) ++last;
    const CUdeviceptr begin = AddressOf(cells[first]);
    const CUdeviceptr end = AddressOf(cells[last]) + layout_.cells[cells[last]].bytes;
    if (auto status = device_.Unmap(begin, end - begin); !status.ok()) return status;
    for (size_t i = first; i <= last; ++i) {
      auto node = mapped_.extract(cells[i]);
      unopened_.erase(cells[i]);
      report.unmapped_bytes += node.mapped().memory.bytes();
      pool_.Put(std::move(node.mapped()));
    }
    first = last + 1;
  }
  return absl::OkStatus();
}

std::set<uint32_t> Arena::ComponentsOf(const std::vector<uint32_t>& cells) const {
  std::set<uint32_t> components;
  for (uint32_t cell : cells) components.insert(layout_.cells[cell].component);
  return components;
}

// Whether what `cells` come from is what it was.
absl::Status Arena::CheckSources(const std::vector<uint32_t>& cells, std::span<const Source* const> sources) const {
  for (uint32_t component : ComponentsOf(cells)) {
    if (auto status = sources[component]->CheckUnchanged(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Waits until what `cells` come from is known to be right.
absl::Status Arena::AwaitSources(const std::vector<uint32_t>& cells, std::span<const Source* const> sources,
                                 const std::stop_token& stop) const {
  for (uint32_t component : ComponentsOf(cells)) {
    if (auto status = sources[component]->AwaitEnd(stop); !status.ok()) return status;
  }
  return absl::OkStatus();
}

uint64_t Arena::CountUndigested(const std::vector<uint32_t>& cells, std::span<const Source* const> sources) const {
  return static_cast<uint64_t>(std::count_if(cells.begin(), cells.end(), [&](uint32_t cell) {
    return !sources[layout_.cells[cell].component]->HasDigest(cell);
  }));
}

absl::StatusOr<std::vector<uint32_t>> Arena::FindWrong(const std::vector<uint32_t>& cells,
                                                       std::span<const Source* const> sources) {
  if (cells.empty()) return std::vector<uint32_t>();
  // Copies that an error left under way would still be writing.
  if (auto status = Settle(); !status.ok()) return status;
  // A kernel that touched one of these would cost the device its context.
  while (!unopened_.empty()) {
    if (auto status = OpenCell(*unopened_.begin()); !status.ok()) return status;
    unopened_.erase(unopened_.begin());
  }
  busy_ = true;
  const auto digests = digester_.Digest(ItemsOf(cells));
  if (!digests.ok()) return digests.status();
  busy_ = false;
  return WrongOf(cells, *digests, sources);
}

std::vector<DigestItem> Arena::ItemsOf(const std::vector<uint32_t>& cells) const {
  std::vector<DigestItem> items;
  for (uint32_t cell : cells) {
    items.push_back({.address = AddressOf(cell), .word_count = layout_.cells[cell].bytes / 8, .first_index = 0});
  }
  return items;
}

std::vector<uint32_t> Arena::WrongOf(const std::vector<uint32_t>& cells, const std::vector<uint64_t>& digests,
                                     std::span<const Source* const> sources) const {
  std::vector<uint32_t> wrong;
  for (size_t i = 0; i < cells.size(); ++i) {
    const uint32_t component = layout_.cells[cells[i]].component;
    if (!sources[component]->Accept(cells[i], digests[i])) wrong.push_back(cells[i]);
  }
  return wrong;
}

absl::Status Arena::Refill(const std::vector<uint32_t>& wrong, std::span<const Source* const> sources) {
  if (wrong.empty()) return absl::OkStatus();
  absl::Status status;
  CopyQueue copies(device_, stream_, std::stop_token());
  for (uint32_t cell : wrong) {
    if (status = CopyCell(cell, sources, Readers::kPerhaps, copies).status(); !status.ok()) break;
  }
  if (auto finished = Settle(); status.ok()) status = finished;
  if (!status.ok()) return status;
  auto still_wrong = FindWrong(wrong, sources);
  if (!still_wrong.ok()) return still_wrong.status();
  if (still_wrong->empty()) return absl::OkStatus();
  // That the source is another one by now says more.
  if (auto changed = CheckSources(*still_wrong, sources); !changed.ok()) return changed;
  const LayoutCell& place = layout_.cells[still_wrong->front()];
  return Refuse(
      absl::StatusCode::kDataLoss, "VERIFY",
      absl::StrCat("cell ", still_wrong->front(), " of component ", layout_.components[place.component].name, " and ",
                   still_wrong->size() - 1, " more do not hold their source's bytes, nor after a refill"));
}

absl::StatusOr<VerifyReport> Arena::Verify(std::span<const Source* const> sources) {
  const std::vector<uint32_t> cells = MappedCells();
  // An error here says nothing about the bytes.
  const auto wrong = FindWrong(cells, sources);
  if (!wrong.ok()) return wrong.status();
  if (auto status = Refill(*wrong, sources); !status.ok()) {
    // A failing call need not fail again; bytes that were wrong and are wrong again are not given another chance.
    if (absl::IsDataLoss(status) || !Mend(sources).ok()) broken_ = true;
    return status;
  }
  return VerifyReport{.verified_cells = cells.size(),
                      .refilled_cells = wrong->size(),
                      .absent_cells = layout_.cells.size() - cells.size()};
}

Footprint Arena::Measure() const {
  Footprint footprint;
  footprint.components.resize(layout_.components.size());
  for (uint32_t cell = 0; cell < layout_.cells.size(); ++cell) {
    const auto handle = device_.HandleAt(AddressOf(cell));
    if (!handle.ok() && footprint.status.ok()) footprint.status = handle.status();
    if (handle.value_or(0) == 0) continue;
    const LayoutCell& place = layout_.cells[cell];
    footprint.components[place.component].cells_on_gpu += 1;
    footprint.components[place.component].device_bytes += place.bytes;
    footprint.device_bytes += place.bytes;
  }
  return footprint;
}

absl::StatusOr<int> Arena::Descriptor(uint32_t cell) {
  const auto found = mapped_.find(cell);
  if (found == mapped_.end()) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "NOT_ACTIVE", absl::StrCat("cell ", cell, " is not resident"));
  }
  if (auto status = pool_.Export(found->second); !status.ok()) return status;
  return found->second.descriptor.get();
}

std::vector<uint32_t> Arena::MappedCells() const {
  std::vector<uint32_t> cells;
  for (const auto& [cell, memory] : mapped_) cells.push_back(cell);
  return cells;
}

Plan Arena::CurrentPlan() const {
  Plan plan = NoneResident(layout_);
  for (const auto& [cell, memory] : mapped_) plan.cells[cell] = CellResidency::kResident;
  return plan;
}

}  // namespace residency
