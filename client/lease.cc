// SPDX-License-Identifier: Apache-2.0
#include "client/lease.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/lease_pages.h"
#include "client/reader.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr size_t kAmbiguous = static_cast<size_t>(-1);

// How often this thread is inside each lease. An entry lives while a use of it does, and a lease's pages live while
// anybody is inside, so an address here is never stale.
struct Nesting {
  const LeasePages* pages;
  uint64_t depth;
};
thread_local std::vector<Nesting> nestings;

std::vector<Nesting>::iterator FindNesting(const LeasePages* pages) {
  return std::find_if(nestings.begin(), nestings.end(),
                      [pages](const Nesting& nesting) { return nesting.pages == pages; });
}

}  // namespace

Use::~Use() {
  if (pages_ == nullptr) return;
  const auto nesting = FindNesting(pages_);
  if (nesting != nestings.end() && --nesting->depth == 0) nestings.erase(nesting);
  // The last one to leave may be what lets the pages go while it is still in Leave, so it leaves by a copy of the view.
  UseWord word = pages_->word();
  word.Leave();
}

absl::Status Phase::End() {
  if (calls_ == nullptr) return absl::OkStatus();
  const absl::Status status = calls_->CallEndPhase(lease_id_, begun_.phase_id);
  if (status.ok()) calls_ = nullptr;
  return status;
}

absl::StatusOr<Lease> Lease::Make(Reader& reader, LeaseRecord& record, TensorTable table, PhaseCalls* phases) {
  Lease lease(reader, record, phases);
  const LeaseGrant& grant = record.pages->grant();
  if (table.layout_digest != grant.layout_digest || table.span_bytes != grant.span_bytes) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "LAYOUT_MISMATCH",
                  absl::StrFormat("%s: the table of tensors is of layout %016x, the lease of %016x; the model was "
                                  "registered anew in between, attach again",
                                  grant.model, table.layout_digest, grant.layout_digest));
  }
  lease.AddTensors(std::move(table));
  return lease;
}

void Lease::AddTensors(TensorTable table) {
  tensors_.reserve(table.tensors.size());
  for (TensorEntry& entry : table.tensors) {
    const auto [found, inserted] = by_name_.try_emplace(entry.name, tensors_.size());
    if (!inserted) found->second = kAmbiguous;
    LeaseTensor tensor;
    static_cast<TensorEntry&>(tensor) = std::move(entry);
    tensor.address = record_->pages->address() + tensor.device_offset;
    tensors_.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    by_name_.try_emplace(absl::StrCat(tensors_[i].component, "/", tensors_[i].name), i);
  }
}

Lease::Lease(Lease&& other) noexcept
    : reader_(other.reader_),
      record_(std::exchange(other.record_, nullptr)),
      phases_(other.phases_),
      tensors_(std::move(other.tensors_)),
      by_name_(std::move(other.by_name_)) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  std::swap(reader_, other.reader_);
  std::swap(record_, other.record_);
  std::swap(phases_, other.phases_);
  std::swap(tensors_, other.tensors_);
  std::swap(by_name_, other.by_name_);
  return *this;
}

Lease::~Lease() {
  if (record_ != nullptr) reader_->Retire(record_->id);
}

const LeaseTensor* Lease::Find(std::string_view tensor) const {
  const auto found = by_name_.find(tensor);
  if (found == by_name_.end() || found->second == kAmbiguous) return nullptr;
  return &tensors_[found->second];
}

const std::string& Lease::model() const { return record_->pages->grant().model; }

const std::string& Lease::device_uuid() const { return record_->pages->grant().device_uuid; }

uint64_t Lease::id() const { return record_->id; }

uint64_t Lease::generation() const { return record_->generation.load(std::memory_order_acquire); }

absl::StatusOr<Use> Lease::Use(const UseOptions& options) {
  LeasePages* const pages = record_->pages.get();
  if (const auto nesting = FindNesting(pages); nesting != nestings.end()) {
    pages->word().EnterNested();
    ++nesting->depth;
  } else {
    const EnterResult result = pages->word().Enter(options.deadline);
    if (result != EnterResult::kEntered) return WhyOutside(options.deadline, result == EnterResult::kTimedOut);
    nestings.push_back({pages, 1});
  }
  pages->RememberStreams(options.streams);
  return residency::Use(pages);
}

absl::Status Lease::WhyOutside(absl::Time deadline, bool timed_out) const {
  if (!timed_out) return reader_->StopStatus(*record_);
  return Refuse(absl::StatusCode::kDeadlineExceeded, "DEADLINE",
                absl::StrCat(model(), " was not on its GPU by ", absl::FormatTime(deadline, absl::LocalTimeZone())));
}

absl::StatusOr<Phase> Lease::BeginPhase(std::string_view component, const PhaseOptions& options) {
  if (phases_ == nullptr) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "NOT_PHASED",
                  absl::StrCat(model(), " is held: all of it is there while it is active"));
  }
  const auto begun = phases_->CallBeginPhase(record_->id, component, options.deadline);
  if (!begun.ok()) return begun.status();
  // From here on the phase ends, whether or not its cells come.
  Phase phase(*phases_, record_->id, *begun);
  if (auto status = reader_->AwaitGeneration(record_->id, begun->generation, options.deadline); !status.ok()) {
    return status;
  }
  return phase;
}

void Lease::Forget(CUstream stream) { record_->pages->ForgetStream(stream); }

absl::Status Lease::Read(const LeaseTensor& tensor, uint64_t offset, std::span<uint8_t> out, absl::Time deadline) {
  if (offset > tensor.bytes || out.size() > tensor.bytes - offset) {
    return Refuse(
        absl::StatusCode::kOutOfRange, "OUT_OF_RANGE",
        absl::StrCat(tensor.name, " has ", tensor.bytes, " bytes; ", out.size(), " at ", offset, " are not all in it"));
  }
  if (out.empty()) return absl::OkStatus();
  LeasePages& pages = *record_->pages;
  const auto stream = pages.ReadStream();
  if (!stream.ok()) return stream.status();
  const auto use = Use({.deadline = deadline, .streams = {&*stream, 1}});
  if (!use.ok()) return use.status();
  if (auto status = pages.device().MakeCurrent(); !status.ok()) return status;
  const Driver& driver = pages.device().driver();
  const CUresult copied = driver.cuMemcpyDtoHAsync(out.data(), tensor.address + offset, out.size(), *stream);
  if (auto status = DriverStatus(driver, copied, "cuMemcpyDtoHAsync"); !status.ok()) return status;
  return DriverStatus(driver, driver.cuStreamSynchronize(*stream), "cuStreamSynchronize");
}

absl::Status Lease::ReadTensor(const LeaseTensor& tensor, void* out) {
  return Read(tensor, 0, {static_cast<uint8_t*>(out), tensor.bytes});
}

}  // namespace residency
