// SPDX-License-Identifier: Apache-2.0
//
// The daemon's side of the page channel for tests of the client: real cells of a simulated card, a real socket, real
// use words, and a test that says what is sent when. One thread.
#ifndef RESIDENCY_TESTS_FAKE_DAEMON_H_
#define RESIDENCY_TESTS_FAKE_DAEMON_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/lease.h"
#include "client/session.h"
#include "mechanisms/device.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/use_word.h"
#include "proto/channel.pb.h"
#include "tests/test_driver.h"

namespace residency {

inline constexpr uint64_t kFakeCellBytes = uint64_t{2} << 20;
inline constexpr uint32_t kFakeCells = 4;
inline constexpr uint64_t kFakeDigest = 0xfeedfacecafef00d;

// What byte `offset` of the fake model is in `generation`.
uint8_t FakeByte(uint64_t generation, uint64_t offset);

// Of a model with components "unet" and "vae", two cells each: "weight" in both, "bias" across a cell's end in "unet".
TensorTable FakeTable();

class FakeDaemon {
 public:
  FakeDaemon();

  // The client's end of the channel, past Hello and Welcome.
  Session Connect(const std::string& client_name = "test");
  const std::optional<v1::Hello>& hello() const { return hello_; }
  const std::string& device_uuid() const { return device_->info().uuid; }
  const Device& device() const { return *device_; }

  void Grant(uint64_t lease_id, const std::string& uuid = {});
  // Makes cells [first, first + count) with the bytes of `generation` and sends them.
  void SendCells(uint64_t lease_id, uint64_t generation, uint32_t first, uint32_t count, bool last);
  // Grant is not part of it.
  void SendGeneration(uint64_t lease_id, uint64_t generation) {
    SendCells(lease_id, generation, 0, kFakeCells, /*last=*/true);
  }
  void Revoke(uint64_t lease_id, uint64_t generation);
  void EndLease(uint64_t lease_id, const std::string& reason);
  // What the daemon does when a lease may end: revokes it where it has cells, calls `released` once the client has let
  // go, and ends it.
  void Release(uint64_t lease_id, const std::function<void()>& released);
  void HangUp() { channel_->TakeSocket().reset(); }
  UseWord& word(uint64_t lease_id) { return words_.at(lease_id)->word; }

  // The client's next packet; fails the test where none comes.
  v1::ClientPacket Receive();
  // Whether the client keeps quiet for a while.
  bool HearsNothing();
  // Receives Released packets until they name `count` cells; the cells in order of arrival.
  std::vector<uint32_t> ReceiveReleased(uint64_t lease_id, uint64_t generation, size_t count);

 private:
  struct Word {
    explicit Word(UseWordMapping mapped) : mapping(std::move(mapped)), word(mapping.word()) {}
    UseWordMapping mapping;
    UseWord word;
    uint64_t generation = 0;
    int held_cells = 0;  // that the client may have mapped
  };
  void Send(const v1::DaemonPacket& packet, std::span<const int> descriptors = {});

  std::unique_ptr<Device> device_;
  std::optional<PageChannel> channel_;
  std::optional<v1::Hello> hello_;
  std::map<uint64_t, std::unique_ptr<Word>> words_;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_FAKE_DAEMON_H_
