// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/arena.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// Cells are mapped about this far ahead of their copies: enough that the copy engine never waits for the
// page tables, while mapping everything first costs 3 to 5 % (155.5 against 164 ms for 8 GiB on an H200).
constexpr uint64_t kMapAheadBytes = 64 * kMiB;

}  // namespace

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const Device& device, CellPool& pool, Digester& digester,
                                                     const Layout& layout) {
  AddressRange span;
  if (layout.span_bytes > 0) {
    auto reserved = device.Reserve(layout.span_bytes);
    if (!reserved.ok()) return reserved.status();
    span = *std::move(reserved);
  }
  auto stream = device.CreateStream();
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<Arena>(new Arena(device, pool, digester, layout, std::move(span), *std::move(stream)));
}

Arena::~Arena() {
  RealizeReport report;
  // A device that refuses this is lost, and its memory goes with its context.
  (void)Remove(ResidentCells(), report);
}

absl::StatusOr<RealizeReport> Arena::Realize(const Plan& plan, std::span<const Source* const> sources) {
  if (broken_ && Price(layout_, plan) != 0) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "BROKEN",
                  "an earlier transition of this model failed and could not be undone");
  }
  const Plan before = CurrentPlan();
  RealizeReport report;
  const absl::Status status = Apply(plan, sources, report);
  if (status.ok()) return report;
  RealizeReport undone;
  if (!Apply(before, sources, undone).ok()) broken_ = true;
  return status;
}

absl::Status Arena::Apply(const Plan& plan, std::span<const Source* const> sources, RealizeReport& report) {
  std::vector<uint32_t> leaving;
  std::vector<uint32_t> coming;
  for (uint32_t cell = 0; cell < layout_.cells.size(); ++cell) {
    const bool wanted = plan.cells[cell] == CellResidency::kResident;
    const bool there = mapped_.contains(cell);
    if (there && !wanted) leaving.push_back(cell);
    if (!there && wanted) coming.push_back(cell);
  }
  if (auto status = Remove(leaving, report); !status.ok()) return status;
  if (auto status = Add(coming, sources, report); !status.ok()) return status;
  const uint64_t measured_bytes = Measure().device_bytes;
  const uint64_t priced_bytes = Price(layout_, plan);
  if (measured_bytes != priced_bytes) {
    return Refuse(absl::StatusCode::kInternal, "FOOTPRINT",
                  absl::StrCat("the plan is priced at ", priced_bytes, " bytes, the driver shows ", measured_bytes));
  }
  return absl::OkStatus();
}

absl::Status Arena::Remove(const std::vector<uint32_t>& cells, RealizeReport& report) {
  for (size_t first = 0; first < cells.size();) {
    size_t last = first;
    while (last + 1 < cells.size() && cells[last + 1] == cells[last] + 1) ++last;
    const CUdeviceptr begin = AddressOf(cells[first]);
    const CUdeviceptr end = AddressOf(cells[last]) + layout_.cells[cells[last]].bytes;
    if (auto status = device_.Unmap(begin, end - begin); !status.ok()) return status;
    for (size_t i = first; i <= last; ++i) {
      auto node = mapped_.extract(cells[i]);
      report.unmapped_bytes += node.mapped().memory.bytes();
      pool_.Put(std::move(node.mapped()));
    }
    first = last + 1;
  }
  return absl::OkStatus();
}

absl::Status Arena::Add(const std::vector<uint32_t>& cells, std::span<const Source* const> sources,
                        RealizeReport& report) {
  size_t next_to_map = 0;
  uint64_t ahead_bytes = 0;
  absl::Status status;
  for (size_t next_to_copy = 0; next_to_copy < cells.size() && status.ok(); ++next_to_copy) {
    while (next_to_map < cells.size() && (next_to_map <= next_to_copy || ahead_bytes < kMapAheadBytes) && status.ok()) {
      status = MapCell(cells[next_to_map]);
      ahead_bytes += layout_.cells[cells[next_to_map]].bytes;
      ++next_to_map;
    }
    if (!status.ok()) break;
    const uint64_t bytes = layout_.cells[cells[next_to_copy]].bytes;
    status = Fill(cells[next_to_copy], sources);
    ahead_bytes -= bytes;
    report.copied_bytes += bytes;
  }
  // Whether or not it went well: no copy may be in flight when the caller changes the mapping or gives up.
  if (auto finished = device_.Synchronize(stream_); status.ok()) status = finished;
  if (!status.ok()) return status;
  return CheckCells(cells, sources, report.verified_cells, report.refilled_cells);
}

absl::Status Arena::MapCell(uint32_t cell) {
  auto taken = pool_.Take(layout_.cells[cell].bytes);
  if (!taken.ok()) return taken.status();
  const CUdeviceptr address = AddressOf(cell);
  const uint64_t bytes = taken->memory.bytes();
  absl::Status status = device_.Map(address, taken->memory);
  if (!status.ok()) {
    pool_.Put(*std::move(taken));
    return status;
  }
  status = device_.SetAccess(address, bytes, Access::kReadWrite);
  if (status.ok() || !device_.Unmap(address, bytes).ok()) {
    // Also a cell that could be mapped, but neither opened nor unmapped, is under the span now, and is
    // counted and tried again as such.
    mapped_.emplace(cell, *std::move(taken));
  } else {
    pool_.Put(*std::move(taken));
  }
  return status;
}

absl::Status Arena::Fill(uint32_t cell, std::span<const Source* const> sources) {
  const LayoutCell& place = layout_.cells[cell];
  return device_.CopyToDevice(AddressOf(cell), sources[place.component]->CellData(cell), place.bytes, stream_);
}

absl::StatusOr<std::vector<uint32_t>> Arena::FindWrong(const std::vector<uint32_t>& cells,
                                                       std::span<const Source* const> sources) {
  std::vector<DigestItem> items;
  for (uint32_t cell : cells) {
    items.push_back({.address = AddressOf(cell), .word_count = layout_.cells[cell].bytes / 8, .first_index = 0});
  }
  auto digests = digester_.Digest(items, stream_);
  if (!digests.ok()) return digests.status();
  std::vector<uint32_t> wrong;
  for (size_t i = 0; i < cells.size(); ++i) {
    const uint32_t component = layout_.cells[cells[i]].component;
    if ((*digests)[i] != sources[component]->CellDigest(cells[i])) wrong.push_back(cells[i]);
  }
  return wrong;
}

absl::Status Arena::CheckCells(const std::vector<uint32_t>& cells, std::span<const Source* const> sources,
                               uint64_t& verified_cells, uint64_t& refilled_cells) {
  auto wrong = FindWrong(cells, sources);
  if (!wrong.ok()) return wrong.status();
  absl::Status refilled;
  for (uint32_t cell : *wrong) {
    if (refilled = Fill(cell, sources); !refilled.ok()) break;
  }
  if (!refilled.ok()) {
    (void)device_.Synchronize(stream_);
    return refilled;
  }
  auto still_wrong = FindWrong(*wrong, sources);
  if (!still_wrong.ok()) return still_wrong.status();
  if (!still_wrong->empty()) {
    const LayoutCell& place = layout_.cells[still_wrong->front()];
    return Refuse(
        absl::StatusCode::kDataLoss, "VERIFY",
        absl::StrCat("cell ", still_wrong->front(), " of component ", layout_.components[place.component].name, " and ",
                     still_wrong->size() - 1, " more do not hold their source's bytes, nor after a refill"));
  }
  verified_cells += cells.size();
  refilled_cells += wrong->size();
  return absl::OkStatus();
}

absl::StatusOr<VerifyReport> Arena::Verify(std::span<const Source* const> sources) {
  const std::vector<uint32_t> cells = ResidentCells();
  VerifyReport report;
  report.absent_cells = layout_.cells.size() - cells.size();
  if (auto status = CheckCells(cells, sources, report.verified_cells, report.refilled_cells); !status.ok()) {
    // Any other error says nothing about the bytes.
    if (ReasonOf(status) == "VERIFY") broken_ = true;
    return status;
  }
  return report;
}

Footprint Arena::Measure() const {
  Footprint footprint;
  footprint.components.resize(layout_.components.size());
  for (uint32_t cell = 0; cell < layout_.cells.size(); ++cell) {
    if (!device_.IsBacked(AddressOf(cell))) continue;
    const LayoutCell& place = layout_.cells[cell];
    footprint.components[place.component].cells_on_gpu += 1;
    footprint.components[place.component].device_bytes += place.bytes;
    footprint.device_bytes += place.bytes;
  }
  return footprint;
}

std::vector<uint32_t> Arena::ResidentCells() const {
  std::vector<uint32_t> cells;
  for (const auto& [cell, memory] : mapped_) cells.push_back(cell);
  return cells;
}

absl::StatusOr<int> Arena::Descriptor(uint32_t cell) {
  const auto found = mapped_.find(cell);
  if (found == mapped_.end()) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "NOT_ACTIVE", absl::StrCat("cell ", cell, " is not resident"));
  }
  if (auto status = pool_.Export(found->second); !status.ok()) return status;
  return found->second.descriptor.get();
}

Plan Arena::CurrentPlan() const {
  Plan plan = NoneResident(layout_);
  for (const auto& [cell, memory] : mapped_) plan.cells[cell] = CellResidency::kResident;
  return plan;
}

}  // namespace residency
