// SPDX-License-Identifier: Apache-2.0
//
// A client that damages the memory it was lent: speaks the page channel by itself, maps the cell with the named
// tensor read-write, which a descriptor cannot forbid, inverts one bit and leaves as a good client does.
//
//   flip_bit RUNTIME_DIR MODEL TENSOR BYTE      TENSOR is COMPONENT/NAME
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "mechanisms/device.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/page_channel.h"
#include "proto/channel.pb.h"
#include "proto/residency.grpc.pb.h"

namespace residency {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

void Must(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

void Must(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error_message());
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

void Bound(grpc::ClientContext& context) { context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience)); }

struct DaemonMessage {
  v1::DaemonPacket packet;
  std::vector<UniqueFd> descriptors;
};

class PageClient {
 public:
  explicit PageClient(const std::string& runtime_dir)
      : channel_(Must(ConnectUnix(absl::StrCat(runtime_dir, "/pages.sock"), SOCK_SEQPACKET, absl::Now() + kPatience))) {
    v1::ClientPacket packet;
    packet.mutable_hello()->set_protocol_version(1);
    packet.mutable_hello()->set_client_name("flip_bit");
    const UniqueFd pidfd = Must(OpenPidfd(getpid()));
    const int descriptor = pidfd.get();
    Must(channel_.Send(packet.SerializeAsString(), {&descriptor, 1}));
    welcome_ = Receive().packet.welcome();
  }

  const v1::Welcome& welcome() const { return welcome_; }

  DaemonMessage Receive() {
    const absl::Time deadline = absl::Now() + kPatience;
    while (true) {
      if (std::optional<Packet> packet = Must(channel_.Receive()); packet.has_value()) {
        DaemonMessage message{{}, std::move(packet->descriptors)};
        if (!message.packet.ParseFromString(packet->payload)) throw std::runtime_error("a packet is no DaemonPacket");
        return message;
      }
      pollfd poller{channel_.fd(), POLLIN, 0};
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) throw std::runtime_error("the daemon sent nothing");
      (void)poll(&poller, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    }
  }

  void Acknowledge(const v1::Cells& cells) {
    v1::ClientPacket packet;
    v1::CellsMapped& mapped = *packet.mutable_cells_mapped();
    mapped.set_lease_id(cells.lease_id());
    mapped.set_generation(cells.generation());
    for (const v1::Cell& cell : cells.cells()) {
      mapped.add_cells(cell.index());
      held_.push_back(cell.index());
    }
    Must(channel_.Send(packet.SerializeAsString()));
  }

  // Of all cells that were acknowledged.
  void SendReleased(const v1::Revoke& revoke) {
    v1::ClientPacket packet;
    v1::Released& released = *packet.mutable_released();
    released.set_lease_id(revoke.lease_id());
    released.set_generation(revoke.generation());
    for (uint32_t cell : std::exchange(held_, {})) released.add_cells(cell);
    Must(channel_.Send(packet.SerializeAsString()));
  }

 private:
  PageChannel channel_;
  v1::Welcome welcome_;
  std::vector<uint32_t> held_;
};

// Where `byte` of the tensor lies in the model's span.
uint64_t OffsetOf(v1::Residency::Stub& stub, const std::string& model, const std::string& tensor, uint64_t byte) {
  grpc::ClientContext context;
  Bound(context);
  v1::ListTensorsRequest request;
  request.set_model(model);
  const auto stream = stub.ListTensors(&context, request);
  v1::ListTensorsResponse table;
  for (v1::ListTensorsResponse piece; stream->Read(&piece);) table.MergeFrom(piece);
  Must(stream->Finish());
  for (const v1::Tensor& entry : table.tensors()) {
    const std::string name = absl::StrCat(table.components(static_cast<int>(entry.component())), "/", entry.name());
    if (name == tensor && byte < entry.bytes()) return entry.device_offset() + byte;
  }
  throw std::runtime_error(absl::StrCat("no byte ", byte, " of a tensor ", tensor));
}

void Flip(const Device& device, const v1::Cell& cell, int descriptor, uint64_t offset) {
  const CellMemory memory = Must(device.Import(descriptor, cell.bytes()));
  const AddressRange range = Must(device.Reserve(cell.bytes()));
  Must(device.Map(range.get(), memory));
  Must(device.SetAccess(range.get(), cell.bytes(), Access::kReadWrite));
  {
    const Stream stream = Must(device.CreateStream());
    const CUdeviceptr address = range.get() + (offset - cell.device_offset());
    uint8_t value = 0;
    Must(device.CopyToHost(&value, address, 1, stream));
    Must(device.Synchronize(stream));
    value ^= 0x10;
    Must(device.CopyToDevice(address, &value, 1, stream));
    Must(device.Synchronize(stream));
  }
  Must(device.Unmap(range.get(), cell.bytes()));
}

// Takes all cells of the lease, and damages the one that `offset` lies in. Whether there was one.
bool TakeCells(PageClient& pages, const Driver& driver, uint64_t offset) {
  std::unique_ptr<Device> device;
  bool flipped = false;
  while (true) {
    DaemonMessage message = pages.Receive();
    if (message.packet.has_lease_granted()) {
      device = Must(Device::OpenByUuid(driver, message.packet.lease_granted().device_uuid()));
      continue;
    }
    if (!message.packet.has_cells()) throw std::runtime_error(message.packet.DebugString());
    const v1::Cells& cells = message.packet.cells();
    for (int i = 0; i < cells.cells_size(); ++i) {
      const v1::Cell& cell = cells.cells(i);
      if (offset < cell.device_offset() || offset >= cell.device_offset() + cell.bytes()) continue;
      Flip(*device, cell, message.descriptors.at(static_cast<size_t>(i)).get(), offset);
      flipped = true;
    }
    pages.Acknowledge(cells);
    if (cells.last()) return flipped;
  }
}

// The daemon answers the call once it has its cells back, which it asks for over the page channel.
void Release(v1::Residency::Stub& stub, PageClient& pages, uint64_t lease_id) {
  auto released = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    Bound(context);
    v1::ReleaseLeaseRequest request;
    request.set_session_id(pages.welcome().session_id());
    request.set_lease_id(lease_id);
    v1::ReleaseLeaseResponse response;
    return stub.ReleaseLease(&context, request, &response);
  });
  while (true) {
    const v1::DaemonPacket packet = pages.Receive().packet;
    if (packet.has_revoke()) {
      pages.SendReleased(packet.revoke());
    } else if (packet.lease_ended().reason() == "RELEASED") {
      return Must(released.get());
    } else {
      throw std::runtime_error(packet.DebugString());
    }
  }
}

void Main(const std::string& runtime_dir, const std::string& model, const std::string& tensor, uint64_t byte) {
  const auto channel =
      grpc::CreateChannel(absl::StrCat("unix:", runtime_dir, "/grpc.sock"), grpc::InsecureChannelCredentials());
  const auto stub = v1::Residency::NewStub(channel);
  PageClient pages(runtime_dir);
  SimOptions sim;
  sim.directory = pages.welcome().sim_directory();
  const Driver driver = Must(OpenDriver(Must(ParseDriverKind(pages.welcome().driver())), sim));
  const uint64_t offset = OffsetOf(*stub, model, tensor, byte);
  grpc::ClientContext context;
  Bound(context);
  v1::ActivateRequest request;
  request.set_model(model);
  request.set_session_id(pages.welcome().session_id());
  v1::ActivateResponse response;
  Must(stub->Activate(&context, request, &response));
  if (!TakeCells(pages, driver, offset)) throw std::runtime_error("the tensor lies in none of the cells");
  Release(*stub, pages, response.lease_id());
}

}  // namespace
}  // namespace residency

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fputs("usage: flip_bit RUNTIME_DIR MODEL COMPONENT/TENSOR BYTE\n", stderr);
    return 2;
  }
  try {
    residency::Main(argv[1], argv[2], argv[3], std::strtoull(argv[4], nullptr, 10));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "flip_bit: %s\n", error.what());
    return 1;
  }
  return 0;
}
