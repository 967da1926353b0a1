// SPDX-License-Identifier: Apache-2.0
//
// The reader's side of the protocol: what each packet of the daemon does, and what is answered.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/reader.h"
#include "client/session.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

absl::Status BrokenProtocol(std::string_view what) {
  return Refuse(absl::StatusCode::kInternal, "PROTOCOL",
                absl::StrCat("the daemon does not keep to the protocol of the page channel: ", std::string(what)));
}

absl::Status DaemonGone() {
  return Refuse(absl::StatusCode::kUnavailable, "DAEMON_GONE",
                "the daemon has hung up; weights that are mapped can be read until their lease goes");
}

}  // namespace

void Reader::ReadPackets() {
  absl::Status status = channel_.Flush();
  while (status.ok() && connected_) {
    auto packet = channel_.Receive();
    if (!packet.ok()) {
      status = packet.status();
    } else if (!packet->has_value()) {
      return;
    } else {
      status = OnPacket(**std::move(packet));
    }
  }
  if (connected_) EndSession(ReasonOf(status) == "HANG_UP" ? DaemonGone() : status);
}

absl::Status Reader::OnPacket(Packet packet) {
  v1::DaemonPacket parsed;
  if (!parsed.ParseFromArray(packet.payload.data(), static_cast<int>(packet.payload.size()))) {
    return BrokenProtocol("a packet that is none");
  }
  switch (parsed.packet_case()) {
    case v1::DaemonPacket::kLeaseGranted:
      return OnLeaseGranted(parsed.lease_granted(), packet.descriptors);
    case v1::DaemonPacket::kCells:
      return OnCells(parsed.cells(), std::move(packet.descriptors));
    case v1::DaemonPacket::kRevoke:
      OnRevoke(parsed.revoke());
      return absl::OkStatus();
    case v1::DaemonPacket::kLeaseEnded:
      OnLeaseEnded(parsed.lease_ended());
      return absl::OkStatus();
    case v1::DaemonPacket::kRefused:
      return StatusFromText(parsed.refused().code(), parsed.refused().reason(), parsed.refused().message());
    case v1::DaemonPacket::kWelcome:
    case v1::DaemonPacket::PACKET_NOT_SET:
      break;
  }
  return BrokenProtocol("an unexpected packet");
}

absl::Status Reader::OnLeaseGranted(const v1::LeaseGranted& granted, const std::vector<UniqueFd>& descriptors) {
  if (descriptors.size() != 1) return BrokenProtocol("a lease without its use word");
  if (FindRecord(granted.lease_id()) != nullptr) return BrokenProtocol("a lease that was granted twice");
  auto record = std::make_unique<LeaseRecord>(granted.lease_id(), granted.model());
  LeaseGrant grant{granted.lease_id(), granted.model(), granted.device_uuid(), granted.layout_digest(),
                   granted.span_bytes()};
  const absl::Status opened = OpenPages(*record, std::move(grant), descriptors);
  LeaseRecord& kept = *record;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    records_[granted.lease_id()] = std::move(record);
    // A lease of a phased model is claimed before it has any cells.
    changed_.notify_all();
  }
  if (!opened.ok()) FailGeneration(kept, 0, opened);
  return absl::OkStatus();
}

absl::Status Reader::OpenPages(LeaseRecord& record, LeaseGrant grant, const std::vector<UniqueFd>& descriptors) {
  const auto device = DeviceFor(grant.device_uuid);
  if (!device.ok()) return device.status();
  auto pages = LeasePages::Open(**device, std::move(grant), descriptors[0].get(), wakeup_.get());
  if (!pages.ok()) return pages.status();
  record.pages = *std::move(pages);
  return absl::OkStatus();
}

absl::StatusOr<const Device*> Reader::DeviceFor(const std::string& uuid) {
  std::unique_ptr<Device>& device = devices_[uuid];
  if (device == nullptr) {
    auto opened = Device::OpenByUuid(driver_, uuid);
    if (!opened.ok()) return opened.status();
    device = *std::move(opened);
  }
  return device.get();
}

// The descriptors are closed before anything is answered: they hold the memory as a mapping does.
absl::Status Reader::OnCells(const v1::Cells& cells, std::vector<UniqueFd> descriptors) {
  if (descriptors.size() != static_cast<size_t>(cells.cells_size())) {
    return BrokenProtocol(absl::StrCat(cells.cells_size(), " cells with ", descriptors.size(), " descriptors"));
  }
  LeaseRecord* const record = FindRecord(cells.lease_id());
  if (!WantsCells(record, cells.generation())) {
    descriptors.clear();
    DropCells(record, cells);
    return absl::OkStatus();
  }
  if (!record->pages->word().Read().taken) return BrokenProtocol("cells for a lease whose memory was not revoked");
  std::vector<CellPlace> places;
  for (const v1::Cell& cell : cells.cells()) places.push_back({cell.index(), cell.device_offset(), cell.bytes()});
  const absl::Status mapped = record->pages->MapCells(places, descriptors);
  descriptors.clear();
  if (!mapped.ok()) {
    FailGeneration(*record, cells.generation(), mapped);
    AcknowledgeCells(cells);
    return absl::OkStatus();
  }
  if (cells.last()) OpenGeneration(*record, cells.generation());
  AcknowledgeCells(cells);
  return absl::OkStatus();
}

// Whether to map them: not for a lease that is over, nor for what follows a failure of its generation. A new
// generation after a failed one is a new try, for which users may wait again. A lease that is to end takes what is on
// its way like any other: what it acknowledges it must be able to release.
bool Reader::WantsCells(LeaseRecord* record, uint64_t generation) {
  if (record == nullptr || record->pages == nullptr || generation <= record->released_generation) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (record->ended || !record->stopped.ok()) return false;
  if (record->failure.ok()) return true;
  if (generation <= record->failed_generation) return false;
  record->failure = absl::OkStatus();
  record->pages->word().Resume();
  return true;
}

void Reader::AcknowledgeCells(const v1::Cells& cells) {
  v1::ClientPacket packet;
  v1::CellsMapped& answer = *packet.mutable_cells_mapped();
  answer.set_lease_id(cells.lease_id());
  answer.set_generation(cells.generation());
  for (const v1::Cell& cell : cells.cells()) answer.add_cells(cell.index());
  Send(packet);
}

void Reader::DropCells(const LeaseRecord* record, const v1::Cells& cells) {
  AcknowledgeCells(cells);
  // Sent before the daemon saw that its Revoke was answered.
  if (record == nullptr || cells.generation() > record->released_generation) return;
  std::vector<uint32_t> indices;
  for (const v1::Cell& cell : cells.cells()) indices.push_back(cell.index());
  SendReleased(record->id, cells.generation(), indices);
}

void Reader::SendReleased(uint64_t lease_id, uint64_t generation, const std::vector<uint32_t>& cells) {
  v1::ClientPacket packet;
  v1::Released& released = *packet.mutable_released();
  released.set_lease_id(lease_id);
  released.set_generation(generation);
  released.mutable_cells()->Assign(cells.begin(), cells.end());
  Send(packet);
}

void Reader::OpenGeneration(LeaseRecord& record, uint64_t generation) {
  record.generation.store(generation, std::memory_order_release);
  record.pages->word().Open();
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

// The word is taken, so nobody is inside.
void Reader::FailGeneration(LeaseRecord& record, uint64_t generation, const absl::Status& why) {
  while (record.pages != nullptr) {
    const auto piece = record.pages->UnmapPiece();
    if (!piece.ok() || piece->empty()) break;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    record.failure = why;
    record.failed_generation = generation;
    changed_.notify_all();
  }
  // Users that wait for this generation need not.
  if (record.pages != nullptr) record.pages->word().Stop(kStoppedByClient);
  v1::ClientPacket packet;
  v1::LeaseFailed& failed = *packet.mutable_lease_failed();
  failed.set_lease_id(record.id);
  failed.set_code(absl::StatusCodeToString(why.code()));
  failed.set_reason(ReasonOf(why));
  failed.set_message(std::string(why.message()));
  Send(packet);
}

void Reader::OnRevoke(const v1::Revoke& revoke) {
  LeaseRecord* const record = FindRecord(revoke.lease_id());
  if (record != nullptr && record->pages != nullptr) {
    record->revoked = std::max(record->revoked.value_or(0), revoke.generation());
    // At once, because the packets behind this one may bring the next generation.
    Advance(*record);
    return;
  }
  // A lease that went meanwhile, or never came to be, has nothing.
  SendReleased(revoke.lease_id(), revoke.generation(), {});
}

void Reader::OnLeaseEnded(const v1::LeaseEnded& ended) {
  LeaseRecord* const record = FindRecord(ended.lease_id());
  if (record == nullptr) return;
  std::string what = ended.reason() == "UNLOADED" ? " was unloaded" : ": the lease on it has ended";
  if (!ended.message().empty()) what = absl::StrCat(": ", ended.message());
  absl::Status why = Refuse(absl::StatusCode::kAborted, ended.reason(), absl::StrCat(record->model, what));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    record->ended = true;
    // The daemon ends a lease that has failed; why it failed says more.
    if (!record->failure.ok()) why = record->failure;
  }
  StopUsers(*record, why);
}

void Reader::EndSession(const absl::Status& why) {
  connected_ = false;
  channel_.TakeSocket().reset();
  // First, so that whoever sees that the session is over finds every lease stopped.
  for (const auto& [lease_id, record] : records_) StopUsers(*record, why);
  const std::lock_guard<std::mutex> lock(mutex_);
  session_status_ = why;
  changed_.notify_all();
  // Leases that waited for the daemon have nothing to wait for, and may have had their turn already.
  Wake();
}

void Reader::Send(const v1::ClientPacket& packet) {
  if (!connected_) return;
  const absl::Status status = channel_.Send(packet.SerializeAsString());
  if (!status.ok()) EndSession(ReasonOf(status) == "HANG_UP" ? DaemonGone() : status);
}

}  // namespace residency
