// SPDX-License-Identifier: Apache-2.0
//
// A client of the page channel that goes one step of the protocol for each line of standard input, and answers with
// that line once it stands there, so that a test can kill it, stop it or look at it at each. It is made of the packets
// themselves and of nothing of the client library. After an error it says so and ends.
//   hello        said Hello, read Welcome
//   activate     asked for a lease over gRPC, and has the reply
//   grant        read LeaseGranted and mapped the use word
//   receive      read a packet of cells, whose descriptors it holds
//   import       imported them, and holds the descriptors still
//   map          mapped them, closed the descriptors
//   acknowledge  answered the packet, and opened the use word where it was the last
//   attach       the four before, until all cells are there
//   enter        is in a use, for good
//   revoke       read a Revoke
//   take         took the pages and unmapped them
//   release-one  answered the Revoke with one cell
//   release      answered it with all, or the others
//   fork         has a child with all its descriptors, which ends with standard input and does nothing
//
//   protocol_client RUNTIME_DIR MODEL
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "mechanisms/device.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/use_word.h"
#include "proto/channel.pb.h"
#include "proto/residency.grpc.pb.h"

namespace residency {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(40);

absl::Status Wrong(const std::string& what) { return absl::InternalError(what); }

class ProtocolClient {
 public:
  ProtocolClient(std::string runtime_dir, std::string model)
      : runtime_dir_(std::move(runtime_dir)), model_(std::move(model)) {}

  absl::Status Go(const std::string& step) {
    using Step = absl::Status (ProtocolClient::*)();
    static const std::map<std::string, Step> steps = {
        {"hello", &ProtocolClient::Hello},
        {"activate", &ProtocolClient::Activate},
        {"grant", &ProtocolClient::Grant},
        {"receive", &ProtocolClient::ReceiveCells},
        {"import", &ProtocolClient::Import},
        {"map", &ProtocolClient::Map},
        {"attach", &ProtocolClient::Attach},
        {"acknowledge", &ProtocolClient::Acknowledge},
        {"enter", &ProtocolClient::Enter},
        {"revoke", &ProtocolClient::AwaitRevoke},
        {"take", &ProtocolClient::TakePages},
        {"release", &ProtocolClient::Release},
        {"release-one", &ProtocolClient::ReleaseOne},
        {"fork", &ProtocolClient::LeaveChild},
    };
    const auto found = steps.find(step);
    return found == steps.end() ? Wrong("no such step") : (this->*found->second)();
  }

 private:
  absl::Status Hello() {
    auto socket = ConnectUnix(runtime_dir_ + "/pages.sock", SOCK_SEQPACKET, absl::Now() + kPatience);
    if (!socket.ok()) return socket.status();
    channel_.emplace(*std::move(socket));
    const auto pidfd = OpenPidfd(getpid());
    if (!pidfd.ok()) return pidfd.status();
    v1::ClientPacket packet;
    packet.mutable_hello()->set_protocol_version(1);
    packet.mutable_hello()->set_client_name("protocol_client");
    const int descriptor = pidfd->get();
    if (auto status = channel_->Send(packet.SerializeAsString(), {&descriptor, 1}); !status.ok()) return status;
    auto answer = Receive();
    if (!answer.ok()) return answer.status();
    if (!answer->has_welcome()) return Wrong("no Welcome came");
    welcome_ = answer->welcome();
    return absl::OkStatus();
  }

  absl::Status Activate() {
    const auto stub = v1::Residency::NewStub(
        grpc::CreateChannel(absl::StrCat("unix:", runtime_dir_, "/grpc.sock"), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::ActivateRequest request;
    request.set_model(model_);
    request.set_session_id(welcome_.session_id());
    v1::ActivateResponse response;
    const grpc::Status status = stub->Activate(&context, request, &response);
    return status.ok() ? absl::OkStatus() : Wrong(status.error_message());
  }

  absl::Status Grant() {
    auto packet = Receive();
    if (!packet.ok()) return packet.status();
    if (!packet->has_lease_granted() || descriptors_.size() != 1) return Wrong("no LeaseGranted came");
    grant_ = packet->lease_granted();
    auto mapping = UseWordMapping::Map(descriptors_[0].get());
    if (!mapping.ok()) return mapping.status();
    word_page_.emplace(*std::move(mapping));
    auto kind = ParseDriverKind(welcome_.driver());
    if (!kind.ok()) return kind.status();
    auto driver = OpenDriver(*kind, SimOptions{.directory = welcome_.sim_directory()});
    if (!driver.ok()) return driver.status();
    driver_ = *driver;
    auto device = Device::OpenByUuid(driver_, grant_.device_uuid());
    if (!device.ok()) return device.status();
    device_ = *std::move(device);
    auto span = device_->Reserve(grant_.span_bytes());
    if (!span.ok()) return span.status();
    span_ = *std::move(span);
    return absl::OkStatus();
  }

  absl::Status ReceiveCells() {
    auto packet = Receive();
    if (!packet.ok()) return packet.status();
    if (!packet->has_cells()) return Wrong("no Cells came");
    cells_ = packet->cells();
    return absl::OkStatus();
  }

  absl::Status Import() {
    for (int i = 0; i < cells_.cells_size(); ++i) {
      auto memory = device_->Import(descriptors_[i].get(), cells_.cells(i).bytes());
      if (!memory.ok()) return memory.status();
      imported_.push_back(*std::move(memory));
    }
    return absl::OkStatus();
  }

  absl::Status Map() {
    for (int i = 0; i < cells_.cells_size(); ++i) {
      const v1::Cell& cell = cells_.cells(i);
      const CUdeviceptr address = span_.get() + cell.device_offset();
      if (auto status = device_->Map(address, imported_[i]); !status.ok()) return status;
      if (auto status = device_->SetAccess(address, cell.bytes(), Access::kReadOnly); !status.ok()) return status;
      mapped_.push_back(cell);
    }
    imported_.clear();
    descriptors_.clear();
    return absl::OkStatus();
  }

  absl::Status Acknowledge() {
    if (cells_.last()) word_page_->word().Open();
    v1::ClientPacket packet;
    v1::CellsMapped& answer = *packet.mutable_cells_mapped();
    answer.set_lease_id(cells_.lease_id());
    answer.set_generation(cells_.generation());
    for (const v1::Cell& cell : cells_.cells()) answer.add_cells(cell.index());
    return channel_->Send(packet.SerializeAsString());
  }

  absl::Status Attach() {
    // A packet that was received before is gone on with.
    bool pending = !descriptors_.empty() && cells_.cells_size() > 0;
    do {
      absl::Status status = std::exchange(pending, false) ? absl::OkStatus() : ReceiveCells();
      if (status.ok()) status = Import();
      if (status.ok()) status = Map();
      if (status.ok()) status = Acknowledge();
      if (!status.ok()) return status;
    } while (!cells_.last());
    return absl::OkStatus();
  }

  absl::Status Enter() {
    const EnterResult entered = word_page_->word().Enter(absl::Now());
    return entered == EnterResult::kEntered ? absl::OkStatus() : Wrong("the use word is closed");
  }

  absl::Status AwaitRevoke() {
    auto packet = Receive();
    if (!packet.ok()) return packet.status();
    return packet->has_revoke() ? absl::OkStatus() : Wrong("no Revoke came");
  }

  absl::Status TakePages() {
    if (word_page_->word().TryTake() != TakeResult::kTaken) return Wrong("the pages could not be taken");
    for (const v1::Cell& cell : mapped_) {
      if (auto status = device_->Unmap(span_.get() + cell.device_offset(), cell.bytes()); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Release() { return Answer(mapped_.size()); }
  absl::Status ReleaseOne() { return Answer(1); }

  // Says of the last `count` cells that they are let go.
  absl::Status Answer(size_t count) {
    v1::ClientPacket packet;
    v1::Released& answer = *packet.mutable_released();
    answer.set_lease_id(grant_.lease_id());
    answer.set_generation(cells_.generation());
    for (; count > 0; --count) {
      answer.add_cells(mapped_.back().index());
      mapped_.pop_back();
    }
    return channel_->Send(packet.SerializeAsString());
  }

  absl::Status LeaveChild() {
    const pid_t child = fork();
    if (child < 0) return Wrong("fork failed");
    if (child > 0) return absl::OkStatus();
    char byte;
    while (read(STDIN_FILENO, &byte, 1) > 0) {
    }
    _exit(0);
  }

  // The next packet; its descriptors are in descriptors_.
  absl::StatusOr<v1::DaemonPacket> Receive() {
    pollfd ready{.fd = channel_->fd(), .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))) != 1) return Wrong("no packet came");
    auto packet = channel_->Receive();
    if (!packet.ok()) return packet.status();
    if (!packet->has_value()) return Wrong("no packet came");
    v1::DaemonPacket message;
    if (!message.ParseFromString((*packet)->payload)) return Wrong("what came is no DaemonPacket");
    descriptors_ = std::move((*packet)->descriptors);
    return message;
  }

  const std::string runtime_dir_;
  const std::string model_;
  std::optional<PageChannel> channel_;
  v1::Welcome welcome_;
  v1::LeaseGranted grant_;
  std::optional<UseWordMapping> word_page_;
  Driver driver_{};
  std::unique_ptr<Device> device_;
  AddressRange span_;
  v1::Cells cells_;  // the packet received last
  std::vector<UniqueFd> descriptors_;
  std::vector<CellMemory> imported_;
  std::vector<v1::Cell> mapped_;
};

}  // namespace
}  // namespace residency

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: protocol_client RUNTIME_DIR MODEL\n", stderr);
    return 2;
  }
  // Never taken apart: it ends by a signal, or with its input.
  auto& client = *new residency::ProtocolClient(argv[1], argv[2]);
  for (std::string step; std::getline(std::cin, step);) {
    const absl::Status status = client.Go(step);
    std::cout << (status.ok() ? step : absl::StrCat("error: ", status.ToString())) << std::endl;
    if (!status.ok()) _exit(1);
  }
  _exit(0);
}
