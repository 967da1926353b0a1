// SPDX-License-Identifier: Apache-2.0
//
// The client's end for page_channel_fuzz: reads what the daemon sends, and can answer it as the protocol has it, so
// that an input of few bytes comes to where a lie is interesting.
#ifndef RESIDENCY_TESTS_FUZZ_PAGE_CHANNEL_CLIENT_H_
#define RESIDENCY_TESTS_FUZZ_PAGE_CHANNEL_CLIENT_H_

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "mechanisms/page_channel.h"
#include "mechanisms/refusal.h"
#include "mechanisms/use_word.h"
#include "proto/channel.pb.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/page_channel_rig.h"

namespace residency {

class FuzzClient {
 public:
  explicit FuzzClient(PageChannelRig& rig) : rig_(rig), channel_(rig.Connect()) {}

  // Sends these bytes with `count` times `descriptor`, and waits until they are handled.
  void SendRaw(const std::string& payload, size_t count = 0, int descriptor = STDERR_FILENO) {
    alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
    iovec part{const_cast<char*>(payload.data()), payload.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (count > 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(count * sizeof(int));
      for (size_t i = 0; i < count; ++i) memcpy(CMSG_DATA(header) + i * sizeof(int), &descriptor, sizeof(int));
    }
    // The daemon may have hung up, which is what Read tells.
    if (channel_.fd() >= 0 && sendmsg(channel_.fd(), &message, MSG_NOSIGNAL) >= 0) rig_.Settle(channel_.fd());
  }

  void Send(const v1::ClientPacket& packet) { SendRaw(packet.SerializeAsString()); }

  void Hello(const std::string& name) {
    const UniqueFd pidfd = *OpenPidfd(getpid());
    v1::ClientPacket packet;
    packet.mutable_hello()->set_protocol_version(1);
    packet.mutable_hello()->set_client_name(name);
    SendRaw(packet.SerializeAsString(), 1, pidfd.get());
  }

  // Reads all that has come.
  void Read() {
    while (channel_.fd() >= 0) {
      auto packet = channel_.Receive();
      if (!packet.ok()) {
        Check(ReasonOf(packet.status()) == "HANG_UP", packet.status().ToString());
        return Close();
      }
      if (!packet->has_value()) return;
      v1::DaemonPacket message;
      Check(message.ParseFromString((*packet)->payload), "the daemon sends DaemonPackets");
      Take(message, std::move((*packet)->descriptors));
    }
  }

  // Acknowledges the oldest Cells.
  void Acknowledge() {
    if (cells_.empty()) return;
    const v1::Cells cells = std::move(cells_.front());
    cells_.pop_front();
    v1::ClientPacket packet;
    v1::CellsMapped& mapped = *packet.mutable_cells_mapped();
    mapped.set_lease_id(cells.lease_id());
    mapped.set_generation(cells.generation());
    Held& held = held_[cells.lease_id()];
    if (held.generation != cells.generation()) held = {cells.generation(), false, {}};
    for (const v1::Cell& cell : cells.cells()) {
      mapped.add_cells(cell.index());
      held.cells.push_back(cell.index());
    }
    held.whole = cells.last();
    Send(packet);
  }

  // Lets the whole of a lease go, once it is all mapped.
  void Release(uint64_t lease) {
    const auto held = held_.find(lease);
    if (held == held_.end() || !held->second.whole) return;
    v1::ClientPacket packet;
    packet.mutable_released()->set_lease_id(lease);
    packet.mutable_released()->set_generation(held->second.generation);
    for (const uint32_t cell : std::exchange(held->second.cells, {})) packet.mutable_released()->add_cells(cell);
    Send(packet);
  }

  void Scribble(uint64_t lease, uint64_t word) {
    const auto page = pages_.find(lease);
    if (page == pages_.end()) return;
    Check(pwrite(page->second.get(), &word, sizeof(word), 0) == sizeof(word), "pwrite to a use word's page");
  }

  void Close() { channel_.TakeSocket().reset(); }

  bool is_over() const { return channel_.fd() < 0; }
  const std::string& wire_id() const { return wire_id_; }

 private:
  static constexpr size_t kMostDescriptors = 253;  // SCM_MAX_FD of Linux

  struct Held {
    uint64_t generation = 0;
    bool whole = false;
    std::vector<uint32_t> cells;
  };

  void Take(const v1::DaemonPacket& message, std::vector<UniqueFd> descriptors) {
    if (message.has_welcome()) {
      Check(wire_id_.empty(), "one Welcome comes");
      wire_id_ = message.welcome().session_id();
      Check(wire_id_.size() == 16, "a session's name has 128 bits");
    } else if (message.has_lease_granted()) {
      Check(descriptors.size() == 1, "a page comes with a lease");
      pages_[message.lease_granted().lease_id()] = std::move(descriptors[0]);
    } else if (message.has_cells()) {
      Check(descriptors.size() == static_cast<size_t>(message.cells().cells_size()),
            "a descriptor comes with each cell");
      cells_.push_back(message.cells());
      Check(cells_.size() <= kMaxUnacknowledgedPackets, "no more Cells come than there is credit for");
    } else if (message.has_lease_ended()) {
      held_.erase(message.lease_ended().lease_id());
    }
  }

  PageChannelRig& rig_;
  PageChannel channel_;
  std::string wire_id_;
  std::deque<v1::Cells> cells_;  // not acknowledged yet
  std::map<uint64_t, Held> held_;
  std::map<uint64_t, UniqueFd> pages_;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_FUZZ_PAGE_CHANNEL_CLIENT_H_
