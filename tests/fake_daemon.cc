// SPDX-License-Identifier: Apache-2.0
#include "tests/fake_daemon.h"

#include <poll.h>
#include <sys/socket.h>

#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>

#include "tests/test_driver.h"

namespace residency {
namespace {

constexpr int kPatienceMilliseconds = 20000;
constexpr int kQuietMilliseconds = 100;

// Not Catch's assertions, which are for one thread: a test may wait in ~Lease while the daemon answers on another.
void Must(bool ok, std::source_location where = std::source_location::current()) {
  if (!ok) throw std::runtime_error("fake daemon, line " + std::to_string(where.line()));
}

bool Readable(int fd, int milliseconds) {
  pollfd poller{fd, POLLIN, 0};
  return poll(&poller, 1, milliseconds) > 0;
}

UniqueFd MakeCell(const Device& device, uint64_t generation, uint32_t index) {
  std::vector<uint8_t> bytes(kFakeCellBytes);
  for (uint64_t i = 0; i < kFakeCellBytes; ++i) bytes[i] = FakeByte(generation, index * kFakeCellBytes + i);
  auto memory = device.Create(kFakeCellBytes);
  Must(memory.ok());
  auto range = device.Reserve(kFakeCellBytes);
  Must(range.ok());
  Must(device.Map(range->get(), *memory).ok());
  Must(device.SetAccess(range->get(), kFakeCellBytes, Access::kReadWrite).ok());
  auto stream = device.CreateStream();
  Must(stream.ok());
  Must(device.CopyToDevice(range->get(), bytes.data(), bytes.size(), *stream).ok());
  Must(device.Synchronize(*stream).ok());
  Must(device.Unmap(range->get(), kFakeCellBytes).ok());
  auto fd = device.Export(*memory);
  Must(fd.ok());
  return *std::move(fd);
}

}  // namespace

uint8_t FakeByte(uint64_t generation, uint64_t offset) {
  return static_cast<uint8_t>(generation * 31 + offset * 7 + (offset >> 12));
}

TensorTable FakeTable() {
  TensorTable table;
  table.layout_digest = kFakeDigest;
  table.span_bytes = kFakeCells * kFakeCellBytes;
  table.tensors = {
      {"weight", "unet", "F32", {256, 4}, 4096, 0},
      {"bias", "unet", "U8", {8192}, 8192, kFakeCellBytes - 4096},
      {"weight", "vae", "BF16", {100}, 200, 2 * kFakeCellBytes},
  };
  return table;
}

FakeDaemon::FakeDaemon() { device_ = OpenTestDevice(); }

Session FakeDaemon::Connect(const std::string& client_name) {
  int sockets[2];
  Must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
  channel_.emplace(UniqueFd(sockets[0]));
  v1::DaemonPacket packet;
  packet.mutable_welcome()->set_session_id("0123456789abcdef");
  packet.mutable_welcome()->set_driver("sim");
  // It lies in the socket until the client has said Hello and reads.
  Send(packet);
  auto session = BeginSession(UniqueFd(sockets[1]), client_name, absl::Now() + absl::Seconds(10));
  Must(session.ok());
  auto received = channel_->Receive();
  Must(received.ok());
  Must(received->has_value());
  v1::ClientPacket hello;
  Must(hello.ParseFromString((*received)->payload));
  Must((*received)->descriptors.size() == 1);
  Must(*PidOfPidfd((*received)->descriptors[0].get()) == getpid());
  hello_ = hello.hello();
  return *std::move(session);
}

void FakeDaemon::Send(const v1::DaemonPacket& packet, std::span<const int> descriptors) {
  Must(channel_->Send(packet.SerializeAsString(), descriptors).ok());
}

void FakeDaemon::Grant(uint64_t lease_id, const std::string& uuid) {
  auto page = MakeUseWordPage();
  Must(page.ok());
  auto mapping = UseWordMapping::Map(page->get());
  Must(mapping.ok());
  words_[lease_id] = std::make_unique<Word>(*std::move(mapping));
  v1::DaemonPacket packet;
  v1::LeaseGranted& granted = *packet.mutable_lease_granted();
  granted.set_lease_id(lease_id);
  granted.set_model("model");
  granted.set_device_uuid(uuid.empty() ? device_uuid() : uuid);
  granted.set_layout_digest(kFakeDigest);
  granted.set_span_bytes(kFakeCells * kFakeCellBytes);
  const int descriptors[] = {page->get()};
  Send(packet, descriptors);
}

void FakeDaemon::SendCells(uint64_t lease_id, uint64_t generation, uint32_t first, uint32_t count, bool last) {
  v1::DaemonPacket packet;
  v1::Cells& cells = *packet.mutable_cells();
  cells.set_lease_id(lease_id);
  cells.set_generation(generation);
  cells.set_last(last);
  std::vector<UniqueFd> owners;
  std::vector<int> descriptors;
  for (uint32_t index = first; index < first + count; ++index) {
    v1::Cell& cell = *cells.add_cells();
    cell.set_index(index);
    cell.set_device_offset(index * kFakeCellBytes);
    cell.set_bytes(kFakeCellBytes);
    owners.push_back(MakeCell(*device_, generation, index));
    descriptors.push_back(owners.back().get());
  }
  if (const auto word = words_.find(lease_id); word != words_.end()) {
    word->second->generation = generation;
    word->second->held_cells += static_cast<int>(count);
  }
  Send(packet, descriptors);
}

void FakeDaemon::Release(uint64_t lease_id, const std::function<void()>& released) {
  Word& word = *words_.at(lease_id);
  if (word.held_cells > 0) {
    (void)word.word.Close();
    Revoke(lease_id, word.generation);
    while (word.held_cells > 0) (void)Receive();
  }
  if (released) released();
  EndLease(lease_id, "RELEASED");
}

void FakeDaemon::Revoke(uint64_t lease_id, uint64_t generation) {
  v1::DaemonPacket packet;
  packet.mutable_revoke()->set_lease_id(lease_id);
  packet.mutable_revoke()->set_generation(generation);
  Send(packet);
}

void FakeDaemon::EndLease(uint64_t lease_id, const std::string& reason) {
  v1::DaemonPacket packet;
  packet.mutable_lease_ended()->set_lease_id(lease_id);
  packet.mutable_lease_ended()->set_reason(reason);
  Send(packet);
}

v1::ClientPacket FakeDaemon::Receive() {
  Must(Readable(channel_->fd(), kPatienceMilliseconds));
  auto received = channel_->Receive();
  Must(received.ok());
  Must(received->has_value());
  v1::ClientPacket packet;
  Must(packet.ParseFromString((*received)->payload));
  if (packet.has_released()) {
    const auto word = words_.find(packet.released().lease_id());
    if (word != words_.end()) word->second->held_cells -= packet.released().cells_size();
  }
  if (packet.has_lease_failed()) {
    const auto word = words_.find(packet.lease_failed().lease_id());
    if (word != words_.end()) word->second->held_cells = 0;
  }
  return packet;
}

bool FakeDaemon::HearsNothing() { return !Readable(channel_->fd(), kQuietMilliseconds); }

std::vector<uint32_t> FakeDaemon::ReceiveReleased(uint64_t lease_id, uint64_t generation, size_t count) {
  std::vector<uint32_t> cells;
  while (cells.size() < count) {
    const v1::ClientPacket packet = Receive();
    Must(packet.has_released());
    Must(packet.released().lease_id() == lease_id);
    Must(packet.released().generation() == generation);
    cells.insert(cells.end(), packet.released().cells().begin(), packet.released().cells().end());
  }
  return cells;
}

}  // namespace residency
