// SPDX-License-Identifier: Apache-2.0
//
// Any packets into the daemon's side of the page channel, between honest ones and between the core's orders. Nothing
// that a client sends may harm the daemon, another client's session, or what the core is told; and a client that keeps
// to the protocol is served.
#include <fcntl.h>
#include <google/protobuf/stubs/logging.h>
#include <spdlog/spdlog.h>

#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/page_channel_client.h"
#include "tests/fuzz/page_channel_rig.h"

namespace residency {
namespace {

constexpr int kMaxSteps = 48;
constexpr uint64_t kWitnessLease = 1;
constexpr uint64_t kFirstLease = 2;
constexpr uint64_t kLeases = 8;

constexpr size_t kDescriptorCounts[] = {0, 1, 2, 63, 64, 65, 253};
constexpr uint32_t kCellCounts[] = {0, 1, 2, 63, 64, 65, 130, 200};

// Another client, which must not notice anything.
class Witness {
 public:
  explicit Witness(PageChannelRig& rig) : rig_(rig), client_(rig) {
    client_.Hello("witness");
    client_.Read();
    rig_.OnLoop([&] {
      Check(rig_.Grant(kWitnessLease, client_.wire_id()), "the witness has a session");
      rig_.SendCells(kWitnessLease, 3);
    });
  }

  void CheckServed() {
    client_.Read();
    client_.Acknowledge();
    rig_.OnLoop([&] {
      Check(rig_.IsLive(kWitnessLease), "the witness's lease is mapped when it says so");
      rig_.Revoke(kWitnessLease);
    });
    client_.Release(kWitnessLease);
    rig_.OnLoop([&] { Check(rig_.WasLet(kWitnessLease), "and let go when it says so"); });
    client_.Read();
    Check(!client_.is_over(), "the witness's session goes on");
  }

 private:
  PageChannelRig& rig_;
  FuzzClient client_;
};

// The client that does as the input says.
class Liar {
 public:
  Liar(PageChannelRig& rig, FuzzInput& input) : rig_(rig), input_(input), client_(rig) {}

  void Run(bool hello) {
    if (hello) client_.Hello("liar");
    for (int i = 0; i < kMaxSteps && !input_.empty(); ++i) Step();
    client_.Read();
    if (hello && !lied_) Check(!client_.is_over() && IsOpen(), "a client that keeps to the protocol keeps its session");
  }

 private:
  uint64_t LeaseId() { return kFirstLease + input_.Byte() % kLeases; }
  // Mostly one of its own, but any.
  uint64_t AnyLease() {
    const uint8_t byte = input_.Byte();
    return byte == 0xFF ? input_.Integer(8) : byte % (kFirstLease + kLeases + 1);
  }
  std::string ShortText() { return input_.Text(input_.Byte()); }
  bool IsOpen() {
    client_.Read();
    bool open = false;
    rig_.OnLoop([&] { open = rig_.IsOpen(client_.wire_id()); });
    return open;
  }

  void Step() {
    const uint8_t what = input_.Byte() % 18;
    if (what >= 9) return HonestStep(what);
    lied_ = true;
    v1::ClientPacket packet;
    switch (what) {
      case 0:
        return SendGarbage(input_.Text(input_.Byte()), kDescriptorCounts[input_.Byte() % std::size(kDescriptorCounts)]);
      case 1:  // sizes around the limit, which is 65536
        return SendGarbage(std::string(65536 - 8 + input_.Byte() % 16, static_cast<char>(input_.Byte())), 0);
      case 2: {  // a Hello of any kind
        packet.mutable_hello()->set_protocol_version(input_.Byte() % 3);
        const uint8_t descriptor = input_.Byte();
        packet.mutable_hello()->set_client_name(ShortText());
        const UniqueFd pidfd = *OpenPidfd((descriptor & 1) != 0 ? getpid() : getppid());
        return client_.SendRaw(packet.SerializeAsString(), (descriptor >> 2) % 3,
                               (descriptor & 2) != 0 ? pidfd.get() : STDERR_FILENO);
      }
      case 3:
      case 4:
        packet.mutable_cells_mapped()->set_lease_id(AnyLease());
        packet.mutable_cells_mapped()->set_generation(input_.Number());
        for (uint64_t left = input_.Byte() % 70; left > 0; --left) {
          packet.mutable_cells_mapped()->add_cells(static_cast<uint32_t>(input_.Number()));
        }
        return client_.Send(packet);
      case 5:
      case 6:
        packet.mutable_released()->set_lease_id(AnyLease());
        packet.mutable_released()->set_generation(input_.Number());
        for (uint64_t left = input_.Byte() % 70; left > 0; --left) {
          packet.mutable_released()->add_cells(static_cast<uint32_t>(input_.Number()));
        }
        return client_.Send(packet);
      case 7:
        packet.mutable_lease_failed()->set_lease_id(AnyLease());
        packet.mutable_lease_failed()->set_code(ShortText());
        packet.mutable_lease_failed()->set_reason(ShortText());
        packet.mutable_lease_failed()->set_message(std::string(input_.Integer(2), 'm'));
        return client_.Send(packet);
      default:
        return client_.Close();
    }
  }

  void SendGarbage(const std::string& payload, size_t descriptors) {
    client_.SendRaw(payload, descriptors);
    v1::ClientPacket parsed;
    if (parsed.ParseFromString(payload) && parsed.packet_case() != v1::ClientPacket::PACKET_NOT_SET) return;
    client_.Read();
    Check(client_.is_over(), "garbage ends the session");
  }

  void HonestStep(uint8_t what) {
    const uint64_t lease = LeaseId();
    switch (what) {
      case 9:
        client_.Read();
        return rig_.OnLoop([&] { rig_.Grant(lease, client_.wire_id()); });
      case 10: {
        const uint32_t count = kCellCounts[input_.Byte() % std::size(kCellCounts)];
        return rig_.OnLoop([&] { rig_.SendCells(lease, count); });
      }
      case 11:
        return rig_.OnLoop([&] { rig_.Revoke(lease); });
      case 12:
        return rig_.OnLoop([&] { rig_.End(lease, "RELEASED"); });
      case 13:
        client_.Scribble(lease, input_.Integer(8));
        return rig_.OnLoop([&] { rig_.CloseAndReopen(lease); });
      case 14:
        return client_.Read();
      case 15:  // all that there is to acknowledge
        for (int i = 0; i < 8; ++i) {
          client_.Read();
          client_.Acknowledge();
        }
        return;
      case 16:
        client_.Read();
        return client_.Acknowledge();
      default:
        client_.Read();
        return client_.Release(lease);
    }
  }

  PageChannelRig& rig_;
  FuzzInput& input_;
  FuzzClient client_;
  bool lied_ = false;
};

void RunInput(FuzzInput input) {
  const uint8_t choice = input.Byte();
  PageChannelRig rig(static_cast<OnLet>((choice >> 1) % 3));
  const size_t before = CountDescriptors();
  {
    Witness witness(rig);
    Liar(rig, input).Run((choice & 1) == 0);
    witness.CheckServed();
  }
  // Sessions closes what is its when it goes, or has done so before; what a client made is closed on another thread.
  rig.Stop();
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (CountDescriptors() != before && absl::Now() < deadline) std::this_thread::yield();
  Check(CountDescriptors() == before, "every descriptor is closed again");
}

}  // namespace
}  // namespace residency

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  spdlog::set_level(spdlog::level::off);
  google::protobuf::SetLogHandler(nullptr);
  return 0;
}

// The first byte: bit 0 no Hello to begin with, the others what the core does when a lease is let go; then steps.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  residency::RunInput(residency::FuzzInput(data, size));
  return 0;
}
